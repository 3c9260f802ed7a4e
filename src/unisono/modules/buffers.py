"""The buffers of modules: each replica writes its own, and every run ends with one state for all.

Before a run, each replica gets the values of the primary's buffers. After it, the primary gets the
result: the mean over all replicas, weighted by their samples, for floating-point buffers, such as
BatchNorm statistics, and the value of replica 0 for others, such as counters. So reading a buffer
never communicates, and a run that fails changes none.

Small buffers lie end to end in one *flat* tensor per replica and dtype, so that giving, comparing
and averaging them takes a few calls of torch, whatever their number. Large ones are *loose*.
torch does not count the writes of its batch normalization, nor those through `.data`, so the values
of small buffers are compared, and so are vectors of any size: running statistics are vectors. A
large buffer of another shape has changed if torch has counted a write.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from unisono.errors import ReplicaMismatchError, UnequalCollectivesError, UnsupportedError, add_note
from unisono.modules import statistics
from unisono.modules.attributes import Contents, are_same, raw
from unisono.modules.leaves import fit_for_training
from unisono.reductions import Workers
from unisono.tracing import span

Named = dict[str, Tensor | None]

# Larger buffers are copied, compared and sent separately.
_MOST_FLOATS = 1 << 14
_MOST_OTHERS = 64
_FLAT_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PERSISTENCE = "_non_persistent_buffers_set"


class _Tracked(NamedTuple):
    """A module, its buffers, and the attributes of its clones."""

    module: weakref.ref[nn.Module]
    buffers: Named
    clones: list[dict[str, Any]]


class Buffers:
    """The buffers of all modules of one strategy."""

    def __init__(self, places: tuple[torch.device, ...], workers: Workers) -> None:
        self._places = places
        self._workers = workers
        self._is_on_host = all(place.type == "cpu" for place in places)
        self._tracked: list[_Tracked] = []
        # The buffers of the primaries and, for each replica, of its clones.
        self._primaries: list[Named] = []
        self._clones: list[list[Named]] = [[] for _ in places]
        # What the primaries had when the layout was made, and the replicas have in its place.
        self._noted = Contents()
        self._held = [Contents() for _ in places]
        self._tensors: list[Tensor | None] = []
        self._addresses: list[int] = []
        self._shapes: list[torch.Size] = []
        self._given: list[list[Tensor | None]] = [[] for _ in places]
        # The memory of these, which `buffer.data = tensor` exchanges.
        self._homes: list[list[Tensor]] = [[] for _ in places]
        self._home_addresses: list[list[int]] = [[] for _ in places]
        # Of these, the small ones, and how often each had been written to.
        self._small: list[list[Tensor]] = [[] for _ in places]
        self._versions: list[list[int]] = []
        self._flats: dict[torch.dtype, statistics.Flat] = {}
        self._loose: dict[int, statistics.LooseBuffer] = {}
        # The modules, by their place, that own vectors of floats.
        self._owners_of_vectors: list[int] = []
        # Whether all this is that of the modules there are.
        self._is_laid_out = False
        # Whether a run has begun, and has not been brought to its end.
        self._is_open = False
        # Whether the last run was replayed.
        self._is_replayed = False

    def track(self, modules: Iterable[tuple[nn.Module, Sequence[nn.Module]]]) -> None:
        """Says which modules there are, each with its clones."""
        tracked = [
            _Tracked(weakref.ref(module), raw(module)["_buffers"], list(map(raw, clones)))
            for module, clones in modules
        ]
        if not are_same(_tables(tracked), _tables(self._tracked)):
            # Before the rest, because Ctrl-C may come between.
            self._is_laid_out = False
        self._tracked = tracked

    def give(self) -> None:
        """Before a run: gives the replicas what the primaries have."""
        if self._are_none():
            self._is_open = True
            return
        with fit_for_training():
            is_new = not self._is_current()
            is_forced = is_new or self._is_open or self._is_replayed
            # Before the rest, because Ctrl-C may come between.
            was_open, self._is_open = self._is_open, True
            self._is_replayed = False
            if is_new:
                self._lay_out()
            for flat in self._flats.values():
                flat.give()
            given = [one.give(self._places, is_forced=is_forced) for one in self._loose.values()]
            if is_new or was_open or any(given):
                self._install()
        self._versions = self._count_writes()

    def find_written(self, recorder: Any = None) -> statistics.Written:
        """After a run, or while all replicas wait: returns what they wrote, or may have written."""
        if self._are_none():
            return statistics.Written([], [], [], are_flats=False)
        with fit_for_training():
            replaced: list[tuple[Tensor, Tensor]] = []
            others: set[tuple[int, str]] = set()
            for i, held in enumerate(self._held):
                given = _tensors(self._given[i])
                if list(map(Tensor.data_ptr, given)) != self._home_addresses[i]:
                    replaced += _taken_home(given, self._homes[i])
                shapes = [one.shape for one in given]
                if not held.are_same() or shapes != self._shapes:
                    others.update(self._take_replaced(i, replaced))
            taken = {id(given) for given, _ in replaced}
            are_many, is_recorded = self._workers.are_many, recorder is not None
            loose = [
                one
                for one in self._loose.values()
                if not taken.isdisjoint(map(id, one.parts))
                # Writes cannot be seen on other workers, or without waiting.
                or one.is_written(by_others=self._train(one.owners) if are_many else is_recorded)
            ]
            are_flats = self._is_written() or not taken.isdisjoint(map(id, chain(*self._small)))
            return statistics.Written(replaced, sorted(others), loose, are_flats)

    def bring_together(self, weights: Sequence[float], written: statistics.Written) -> None:
        """Gives the primaries what the replicas wrote.

        A replica whose weight is 0 had no samples, so its statistics do not count. On many workers
        this is a collective if something may have been written, the same on all of them.
        """
        if not any(written):
            return
        try:
            with fit_for_training(), span("reduce", "buffers"):
                for given, found in written.replaced:
                    given.copy_(found.detach())
                if written.are_flats:
                    statistics.bring_together(list(self._flats.values()), weights, self._workers)
                for one in written.loose:
                    one.bring_together(weights, self._workers)
                self._bring_others(weights, written.others)
        except UnequalCollectivesError as error:
            names = [self._name_of(one.primary) for one in written.loose]
            names += [name for _, name in written.others]
            large = f" Of the large ones this worker wrote {', '.join(names)}." if names else ""
            add_note(
                error,
                "Raised when the buffers that the replicas wrote were brought together, at the end "
                f"of `run`.{large} Every worker must make the same runs, and write the same large "
                "buffers in them.",
            )
            raise

    def end(self, weights: Sequence[float], recorder: Any = None) -> None:
        """Ends a run that has not failed."""
        written = self.find_written(recorder)
        bring = functools.partial(self.bring_together, weights, written)
        is_apart = recorder is not None and (
            recorder.is_apart or (self._workers.are_many and not recorder.is_joint)
        )
        if any(written) and is_apart:
            recorder.call("the exchange of buffers", bring)
        else:
            bring()
        self._is_open = False

    def note_replay(self) -> None:
        """After a replay, whose writes torch has not counted: the next run gives all buffers."""
        self._is_open, self._is_replayed = False, True

    def _bring_others(self, weights: Sequence[float], keys: Sequence[tuple[int, str]]) -> None:
        """Gives the primaries buffers of another kind, and takes away those that are gone."""
        if not keys:
            return
        tracked = [self._tracked[module] for module, _ in keys]
        found = [
            [own["_buffers"].get(name) for own in one.clones]
            for one, (_, name) in zip(tracked, keys, strict=True)
        ]
        kinds = [list(map(_kind, parts)) for parts in found]
        everybody = self._workers.gather_objects(list(zip(keys, kinds, strict=True)))
        for entries in zip(*everybody, strict=False):
            listed = [kind for _, own in entries for kind in own]
            if len({key for key, _ in entries}) > 1 or len(set(listed)) > 1:
                module, name = entries[0][0]
                raise _mismatch(f"{type(self._tracked[module].module()).__name__}.{name}", listed)
        if len(set(map(len, everybody))) > 1:
            raise _mismatch("Some", [f"{len(one)} of another kind" for one in everybody])
        for one, (_, name), parts in zip(tracked, keys, found, strict=True):
            if name not in one.clones[0]["_buffers"]:
                one.buffers.pop(name, None)
                continue
            tensors = [part.detach() for part in _tensors(parts)]
            combined = (
                statistics.combined_of(tensors, weights, self._workers).clone() if tensors else None
            )
            one.buffers[name] = combined
            target = one.module()
            if target is not None:
                is_kept = name not in one.clones[0][_PERSISTENCE]
                names: set[str] = raw(target)[_PERSISTENCE]
                (names.discard if is_kept else names.add)(name)

    def _are_none(self) -> bool:
        """Whether neither modules nor clones have a buffer, which is quick to check."""
        is_bare = self._is_laid_out and not self._tensors and not any(self._primaries)
        return is_bare and not any(map(any, self._clones))

    def _is_current(self) -> bool:
        return (
            self._is_laid_out
            and self._noted.are_same()
            and [tensor.data_ptr() for tensor in _tensors(self._tensors)] == self._addresses
            and all(one.module() is not None for one in self._tracked)
        )

    def _lay_out(self) -> None:
        self._tracked = [one for one in self._tracked if one.module() is not None]
        self._primaries = [one.buffers for one in self._tracked]
        self._clones = [
            [one.clones[i]["_buffers"] for one in self._tracked] for i in range(len(self._places))
        ]
        self._tensors = list(chain.from_iterable(map(dict.values, self._primaries)))
        self._noted.note(self._primaries)
        self._addresses = [tensor.data_ptr() for tensor in _tensors(self._tensors)]
        self._shapes = [tensor.shape for tensor in _tensors(self._tensors)]
        # A buffer that several modules have is one for each replica, too.
        owners: dict[int, list[int]] = {}
        for i, own in enumerate(self._primaries):
            for tensor in _tensors(own.values()):
                owners.setdefault(id(tensor), []).append(i)
        self._loose = {}
        small: dict[torch.dtype, list[Tensor]] = {}
        for key, one in {id(tensor): tensor for tensor in _tensors(self._tensors)}.items():
            modules = [self._tracked[i].module() for i in owners[key]]
            # Torch's observers give their buffers another size in place.
            classes = {cls for module in modules for cls in type(module).__mro__}
            is_resized = any(cls.__module__.startswith("torch.ao.quantization") for cls in classes)
            is_of_norm = all(isinstance(module, _NormBase) for module in modules)
            if not is_resized and (one.numel() > 1 or is_of_norm) and self._is_flat(one):
                small.setdefault(one.dtype, []).append(one)
            else:
                self._loose[key] = statistics.LooseBuffer(
                    one, is_resized or one.numel() < 2, owners[key]
                )
        self._flats = {dtype: statistics.Flat(own, self._places) for dtype, own in small.items()}
        self._owners_of_vectors = [
            i for i, own in enumerate(self._primaries) if any(map(_is_vector, own.values()))
        ]
        self._is_laid_out = True

    def _is_flat(self, buffer: Tensor) -> bool:
        if (
            buffer.layout is not torch.strided
            or type(buffer) not in (Tensor, nn.Buffer)
            or buffer.device != self._places[0]
            or buffer.is_inference()
            or not buffer.is_contiguous()
        ):
            return False
        if buffer.dtype in _FLAT_FLOATS:
            return buffer.numel() <= _MOST_FLOATS or _is_vector(buffer)
        is_plain = not (buffer.is_floating_point() or buffer.is_complex() or buffer.is_quantized)
        return is_plain and buffer.numel() <= _MOST_OTHERS

    def _install(self) -> None:
        for i, clones in enumerate(self._clones):
            parts = {id(one): self._part(one, i) for one in _tensors(self._tensors)}
            self._given[i] = [parts.get(id(tensor)) for tensor in self._tensors]
            self._small[i] = [part for key, part in parts.items() if key not in self._loose]
            given = iter(self._given[i])
            for clone, primary in zip(clones, self._primaries, strict=True):
                clone.clear()
                clone.update((name, next(given)) for name in primary)
            self._held[i].note(clones)
            self._homes[i] = [part.data for part in _tensors(self._given[i])]
            self._home_addresses[i] = list(map(Tensor.data_ptr, self._homes[i]))

    def _part(self, primary: Tensor, replica_id: int) -> Tensor:
        loose = self._loose.get(id(primary))
        if loose is not None:
            return loose.parts[replica_id]
        flat = self._flats[primary.dtype]
        return flat.view_of(flat.parts[replica_id], primary)

    def _take_replaced(
        self, replica_id: int, replaced: list[tuple[Tensor, Tensor]]
    ) -> Iterator[tuple[int, str]]:
        """Puts like tensors that a replica has put in the place of buffers there; yields others."""
        own = iter(self._given[replica_id])
        pairs = zip(self._primaries, self._clones[replica_id], strict=True)
        for module, (primary, clone) in enumerate(pairs):
            yield from ((module, name) for name in clone if name not in primary)
            for name, before in primary.items():
                given, found = next(own), clone.get(name)
                if found is given and name in clone and statistics.is_like(found, before):
                    continue
                is_loose = id(before) in self._loose
                if found is given and found is not None and before is not None and not is_loose:
                    # A flat buffer, which has another size than before.
                    raise UnsupportedError(
                        f"The buffer {self._name_of(before)} was resized in place during a step, "
                        f"from {tuple(before.shape)} to {tuple(found.shape)}. Assign a new tensor "
                        "instead: `module.name = tensor`."
                    )
                # One buffer of several modules is no longer one.
                is_shared = sum(one is before for one in self._tensors) > 1
                if (
                    given is None
                    or found is None
                    or is_shared
                    or not statistics.is_like(found, before)
                ):
                    yield module, name
                else:
                    replaced.append((given, found))
                    clone[name] = given

    def _is_written(self) -> bool:
        """Whether small buffers may have been written; on many workers, all find the same."""
        if not self._flats:
            return False
        if self._versions != self._count_writes():
            return True
        # All workers know which modules train, and reading values from a GPU would wait.
        is_unseen = self._workers.are_many or not self._is_on_host
        if is_unseen and self._train(self._owners_of_vectors):
            return True
        return self._is_on_host and any(flat.differs() for flat in self._flats.values())

    def _train(self, modules: Iterable[int]) -> bool:
        """Whether one of some modules, given by their places, is in training mode."""
        return any(self._tracked[i].clones[0].get("training", True) for i in modules)

    def _count_writes(self) -> list[list[int]]:
        return [[tensor._version for tensor in own] for own in self._small]

    def _name_of(self, buffer: Tensor) -> str:
        named = (item for own in self._primaries for item in own.items())
        return next((name for name, tensor in named if tensor is buffer), "a buffer")


def _taken_home(given: list[Tensor], homes: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Gives buffers their own memory again, and yields those that had another one, with it."""
    for one, home in zip(given, homes, strict=True):
        if one.data_ptr() != home.data_ptr() and statistics.is_like(one, home):
            found = one.data
            one.data = home
            yield one, found


def _tensors(buffers: Iterable[Tensor | None]) -> list[Tensor]:
    return [buffer for buffer in buffers if buffer is not None]


def _is_vector(buffer: Tensor | None) -> bool:
    return buffer is not None and buffer.dim() == 1 and buffer.is_floating_point()


def _tables(tracked: Iterable[_Tracked]) -> list[Named]:
    pairs = ((one.buffers, *(own["_buffers"] for own in one.clones)) for one in tracked)
    return list(chain.from_iterable(pairs))


def _kind(buffer: Tensor | None) -> str:
    if buffer is None:
        return "none"
    return f"{str(buffer.dtype).removeprefix('torch.')} of shape {tuple(buffer.shape)}"


def _mismatch(what: str, kinds: Sequence[str]) -> ReplicaMismatchError:
    found = ", ".join(f"{kind} on replica {i}" for i, kind in enumerate(kinds))
    return ReplicaMismatchError(
        f"The step set the buffer {what} to different values on the replicas: {found}. All "
        "replicas share a buffer after `run`. Keep the state of one replica, such as a cache, in a "
        "plain attribute: `self.cache = ...` without `register_buffer`."
    )
