"""The buffers of modules: each replica writes its own, and every run ends with one state for all.

Before a run, each replica gets the values of the primary's buffers. After it, the primary gets the
result: the mean over all replicas for floating-point buffers, such as BatchNorm statistics, and the
value of replica 0 for others, such as counters. So reading a buffer never communicates, and a run
that fails changes none.

Small buffers lie end to end in one *flat* tensor per replica and dtype, so that giving, comparing
and averaging them takes a few calls of torch, whatever their number. Large ones are *loose*.
torch does not count the writes of its batch normalization, nor those through `.data`, so the values
of small buffers are compared, and so are vectors of any size: running statistics are vectors. A
large buffer of another shape has changed if torch has counted a write.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from unisono.errors import UnequalCollectivesError, UnsupportedError, add_note
from unisono.reductions import Workers
from unisono.tracing import span
from unisono.variables.attributes import are_same, raw
from unisono.variables.leaves import fit_for_training
from unisono.variables.statistics import (
    LooseBuffer,
    Restructured,
    Statistics,
    Written,
    is_like,
    mean_of,
)

Named = dict[str, Tensor | None]

# Larger buffers are copied, compared and sent separately.
_MOST_FLOATS = 1 << 14
_MOST_OTHERS = 64
_FLAT_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


_NOTHING = Written([], [], [], are_flats=False)


class Buffers:
    """The buffers of all modules of one strategy."""

    def __init__(self, places: tuple[torch.device, ...], workers: Workers) -> None:
        self._places = places
        self._workers = workers
        self._is_on_host = all(place.type == "cpu" for place in places)
        self._modules: list[weakref.ref[nn.Module]] = []
        self._primaries: list[Named] = []
        # For each replica, the attributes of its clones and their buffers.
        self._attributes: list[list[dict[str, Any]]] = [[] for _ in places]
        self._clones: list[list[Named]] = [[] for _ in places]
        # What the primaries had when the layout was made, and the replicas have in its place.
        self._names: list[str] = []
        self._tensors: list[Tensor | None] = []
        self._addresses: list[int] = []
        self._shapes: list[torch.Size] = []
        self._given: list[list[Tensor | None]] = [[] for _ in places]
        # Of these, the small ones, and how often each had been written to.
        self._small: list[list[Tensor]] = [[] for _ in places]
        self._versions: list[list[int]] = []
        self._flats = Statistics(places, workers)
        self._loose: dict[int, LooseBuffer] = {}
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
        pairs = list(modules)
        before = [*self._primaries, *chain(*self._clones)]
        primaries = [raw(module)["_buffers"] for module, _ in pairs]
        attributes = [[raw(own[i]) for _, own in pairs] for i in range(len(self._places))]
        clones = [[one["_buffers"] for one in own] for own in attributes]
        now = [*primaries, *chain(*clones)]
        if not are_same(now, before):
            # Before the rest, because Ctrl-C may come between.
            self._is_laid_out = False
        self._modules = [weakref.ref(module) for module, _ in pairs]
        self._primaries, self._attributes, self._clones = primaries, attributes, clones

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
            self._flats.give()
            given = [one.give(self._places, is_forced=is_forced) for one in self._loose.values()]
            if is_new or was_open or any(given):
                self._install()
        self._versions = self._count_writes()

    def find_written(self, recorder: Any = None) -> Written:
        """After a run, or while all replicas wait: returns what they wrote, or may have written."""
        if self._are_none():
            return _NOTHING
        with fit_for_training():
            replaced, others = self._take_in()
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
            return Written(replaced, others, loose, are_flats)

    def bring_together(self, weights: Sequence[float], written: Written) -> None:
        """Gives the primaries what the replicas wrote.

        A replica whose weight is 0 had no samples, so its statistics do not count. On many workers
        this is a collective if something may have been written, the same on all of them.
        """
        if not any(written):
            return
        try:
            with fit_for_training(), span("reduce", "buffers"):
                self._bring(weights, written)
        except UnequalCollectivesError as error:
            add_note(error, self._explanation(written.others, written.loose))
            raise

    def end(self, weights: Sequence[float], recorder: Any = None) -> None:
        """Ends a run that has not failed."""
        written = self.find_written(recorder)
        bring = functools.partial(self.bring_together, weights, written)
        if any(written) and recorder is not None and (self._workers.are_many or recorder.streams):
            recorder.call("the exchange of buffers", bring)
        else:
            bring()
        self._is_open = False

    def note_replay(self) -> None:
        """After a replay, whose writes torch has not counted: the next run gives all buffers."""
        self._is_open, self._is_replayed = False, True

    def _bring(self, weights: Sequence[float], written: Written) -> None:
        for given, found in written.replaced:
            given.copy_(found.detach())
        if written.are_flats:
            self._flats.bring_together(weights)
        for one in written.loose:
            if one.primary.is_floating_point() and one.primary.layout is torch.strided:
                combined = mean_of(one.parts, weights, self._workers)
            else:
                combined = self._workers.of_chief(one.parts[0])
            with torch.inference_mode(mode=one.primary.is_inference()):
                if one.primary.shape != combined.shape:
                    one.primary.resize_(combined.shape)
                one.primary.copy_(combined)
        if written.others:
            modules = [module() for module in self._modules]
            tables = self._primaries, self._attributes
            Restructured(modules, *tables, written.others).settle(weights, self._workers)

    def _are_none(self) -> bool:
        """Whether neither modules nor clones have a buffer, which is quick to check."""
        is_bare = self._is_laid_out and not self._tensors and not any(self._primaries)
        return is_bare and not any(map(any, self._clones))

    def _is_current(self) -> bool:
        """Whether the primaries still have the buffers that the layout was made for."""
        tensors = list(chain.from_iterable(map(dict.values, self._primaries)))
        return (
            self._is_laid_out
            and are_same(tensors, self._tensors)
            and list(chain.from_iterable(self._primaries)) == self._names
            and [tensor.data_ptr() for tensor in _tensors(tensors)] == self._addresses
            and all(module() is not None for module in self._modules)
        )

    def _forget_ended(self) -> None:
        """Removes modules that no longer exist."""
        left = [i for i, module in enumerate(self._modules) if module() is not None]
        if len(left) < len(self._modules):
            self._modules = [self._modules[i] for i in left]
            self._primaries = [self._primaries[i] for i in left]
            self._attributes = [[own[i] for i in left] for own in self._attributes]
            self._clones = [[own[i] for i in left] for own in self._clones]

    def _lay_out(self) -> None:
        self._forget_ended()
        self._tensors = list(chain.from_iterable(map(dict.values, self._primaries)))
        self._names = list(chain.from_iterable(self._primaries))
        self._addresses = [tensor.data_ptr() for tensor in _tensors(self._tensors)]
        self._shapes = [tensor.shape for tensor in _tensors(self._tensors)]
        # A buffer that several modules have is one for each replica, too.
        distinct = {id(tensor): tensor for tensor in _tensors(self._tensors)}
        owners: dict[int, list[int]] = {}
        for i, own in enumerate(self._primaries):
            for tensor in _tensors(own.values()):
                owners.setdefault(id(tensor), []).append(i)
        modules = [module() for module in self._modules]
        self._loose = {}
        flat: dict[int, Tensor] = {}
        for key, one in distinct.items():
            kinds = [modules[i] for i in owners[key]]
            is_resized = any(map(_resizes_buffers, kinds))
            is_of_norm = all(isinstance(kind, _NormBase) for kind in kinds)
            if not is_resized and (one.numel() > 1 or is_of_norm) and self._is_flat(one):
                flat[key] = one
            else:
                self._loose[key] = LooseBuffer(one, is_resized or one.numel() < 2, owners[key])
        self._flats.lay_out(flat)
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
        """Puts the buffers of each replica into its clones."""
        for i, clones in enumerate(self._clones):
            parts = {id(one): self._part(one, i) for one in _tensors(self._tensors)}
            self._given[i] = [parts.get(id(tensor)) for tensor in self._tensors]
            self._small[i] = [part for key, part in parts.items() if key not in self._loose]
            given = iter(self._given[i])
            for clone, primary in zip(clones, self._primaries, strict=True):
                clone.clear()
                clone.update((name, next(given)) for name in primary)

    def _part(self, primary: Tensor, replica_id: int) -> Tensor:
        loose = self._loose.get(id(primary))
        return self._flats.part(primary, replica_id) if loose is None else loose.parts[replica_id]

    def _take_in(self) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[int, str]]]:
        """Returns the buffers that replicas have replaced; see `Written`."""
        replaced: list[tuple[Tensor, Tensor]] = []
        others: set[tuple[int, str]] = set()
        for i, clones in enumerate(self._clones):
            found = list(chain.from_iterable(map(dict.values, clones)))
            shapes = [one.shape for one in _tensors(found)]
            is_same = are_same(found, self._given[i]) and shapes == self._shapes
            if not is_same or list(chain.from_iterable(clones)) != self._names:
                others.update(self._take_replaced(i, replaced))
        return replaced, sorted(others)

    def _take_replaced(
        self, replica_id: int, replaced: list[tuple[Tensor, Tensor]]
    ) -> Iterable[tuple[int, str]]:
        place = 0
        for module, (primary, clone) in enumerate(
            zip(self._primaries, self._clones[replica_id], strict=True)
        ):
            yield from ((module, name) for name in clone if name not in primary)
            for name, before in primary.items():
                given = self._given[replica_id][place]
                found = clone.get(name)
                if found is given and name in clone and is_like(found, before):
                    pass
                elif (
                    before is not None
                    and found is not None
                    and found is given
                    and id(before) not in self._loose
                ):
                    # A flat buffer, which has another size than before.
                    raise UnsupportedError(
                        f"The buffer {self._name_of(before)} was resized in place during a step, "
                        f"from {tuple(before.shape)} to {tuple(found.shape)}. Assign a new tensor "
                        "instead: `module.name = tensor`."
                    )
                elif before is None or given is None or not is_like(found, before):
                    yield module, name
                elif sum(one is before for one in self._tensors) > 1:
                    # It was one buffer of several modules, and is no longer.
                    yield module, name
                else:
                    assert found is not None
                    replaced.append((given, found))
                    clone[name] = given
                place += 1

    def _is_written(self) -> bool:
        """Whether small buffers may have been written; on many workers, all find the same."""
        if not self._flats.flats:
            return False
        if self._versions != self._count_writes():
            return True
        # All workers know which modules train, and reading values from a GPU would wait.
        is_unseen = self._workers.are_many or not self._is_on_host
        if is_unseen and self._train(self._owners_of_vectors):
            return True
        return self._is_on_host and self._flats.differ()

    def _train(self, modules: Iterable[int]) -> bool:
        """Whether one of some modules, given by their places, is in training mode."""
        return any(self._attributes[0][i].get("training", True) for i in modules)

    def _count_writes(self) -> list[list[int]]:
        return [[tensor._version for tensor in own] for own in self._small]

    def _explanation(self, others: list[tuple[int, str]], loose: list[LooseBuffer]) -> str:
        names = [self._name_of(one.primary) for one in loose] + [name for _, name in others]
        written = f" Of the large ones this worker wrote {', '.join(names)}." if names else ""
        return (
            "Raised when the buffers that the replicas wrote were brought together, at the end of "
            f"`run`.{written} Every worker must make the same runs, and write the same large "
            "buffers in them."
        )

    def _name_of(self, buffer: Tensor) -> str:
        names = zip(self._names, self._tensors, strict=True)
        return next((name for name, tensor in names if tensor is buffer), "a buffer")


def _resizes_buffers(module: nn.Module | None) -> bool:
    """Whether a module gives its buffers another size in place, as torch's observers do."""
    return any(cls.__module__.startswith("torch.ao.quantization") for cls in type(module).__mro__)


def _tensors(buffers: Iterable[Tensor | None]) -> list[Tensor]:
    return [buffer for buffer in buffers if buffer is not None]


def _is_vector(buffer: Tensor | None) -> bool:
    return buffer is not None and buffer.dim() == 1 and buffer.is_floating_point()
