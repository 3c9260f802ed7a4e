"""The buffers of all replicas, and how they become one.

Small ones lie end to end in flat tensors. Large ones are copied and compared one by one.

A mean is taken in float64 and rounded once, in the order of all sums. So values that are the same
on all replicas keep their bits, and the result does not depend on who has which replicas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unisono.errors import ReplicaMismatchError
from unisono.kernels import reduce_batch
from unisono.options import ReduceOp
from unisono.reductions import Workers
from unisono.torch_private import copy_each
from unisono.variables.leaves import version_of

_WIDE = torch.float64
# Vector units and libraries for GPUs like the beginning of a tensor to be aligned.
_ALIGNMENT_BYTES = 16
_ABSENT = "none"
_PERSISTENCE = "_non_persistent_buffers_set"


class _Flat:
    """The buffers of one dtype: the primaries, and all of them in one tensor for each replica."""

    def __init__(self, primaries: Sequence[Tensor], places: tuple[torch.device, ...]) -> None:
        self.dtype = primaries[0].dtype
        step = max(1, _ALIGNMENT_BYTES // self.dtype.itemsize)
        padding = torch.zeros(step, dtype=self.dtype, device=places[0])
        # What is put end to end, and where each of the primaries begins there.
        self._sources: list[Tensor] = []
        self.starts: dict[int, int] = {}
        length = 0
        for primary in primaries:
            self.starts[id(primary)] = length
            rest = -primary.numel() % step if self.dtype.is_floating_point else 0
            self._sources += [primary.detach().view(-1), padding[:rest]]
            length += primary.numel() + rest
        self.length = length
        # On the first place: what the replicas begin with, and then what they become.
        self.whole = torch.empty(length, dtype=self.dtype, device=places[0])
        self.parts = [torch.empty(length, dtype=self.dtype, device=place) for place in places]
        self._targets = [primary.detach().view(-1) for primary in primaries]
        self._results = [self.view_of(self.whole, primary).view(-1) for primary in primaries]

    def view_of(self, flat: Tensor, primary: Tensor) -> Tensor:
        """Returns what stands in `flat` for a primary: a tensor that counts its own writes."""
        start = self.starts[id(primary)]
        return flat[start : start + primary.numel()].view(primary.shape).data

    def give(self) -> None:
        """Gives the replicas the values of the primaries, however they were written."""
        torch.cat(self._sources, out=self.whole)
        for part in self.parts:
            part.copy_(self.whole)

    def differs(self) -> bool:
        """Whether a replica, on the host, has other bits than it was given."""
        # The widest integers are compared fastest.
        num_bytes = self.length * self.dtype.itemsize
        kind = torch.int64 if num_bytes % 8 == 0 else torch.uint8
        given = self.whole.view(kind)
        return not all(torch.equal(part.view(kind), given) for part in self.parts)

    def write(self) -> None:
        """Gives the primaries what they have become."""
        copy_each(self._targets, self._results)


class Statistics:
    """The small buffers of all modules."""

    def __init__(self, places: tuple[torch.device, ...], workers: Workers) -> None:
        self._places = places
        self._workers = workers
        self.flats: dict[torch.dtype, _Flat] = {}

    def lay_out(self, primaries: Mapping[int, Tensor]) -> None:
        """Makes room for these buffers on all replicas."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for primary in primaries.values():
            by_dtype.setdefault(primary.dtype, []).append(primary)
        self.flats = {dtype: _Flat(own, self._places) for dtype, own in by_dtype.items()}

    def part(self, primary: Tensor, replica_id: int) -> Tensor:
        """Returns the buffer of a replica."""
        flat = self.flats[primary.dtype]
        return flat.view_of(flat.parts[replica_id], primary)

    def give(self) -> None:
        """Gives the replicas what the primaries have."""
        for flat in self.flats.values():
            flat.give()

    def differ(self) -> bool:
        """Whether a replica, on the host, has written a buffer."""
        return any(flat.differs() for flat in self.flats.values())

    def bring_together(self, weights: Sequence[float]) -> None:
        """Gives the primaries the means of floats, and all else of replica 0."""
        floats = [flat for flat in self.flats.values() if flat.dtype.is_floating_point]
        others = [flat for flat in self.flats.values() if not flat.dtype.is_floating_point]
        counters = []
        if self._workers.are_many and others:
            # What all workers take of the chief, as numbers that can be added to zeros.
            data = torch.cat([flat.parts[0].view(torch.uint8) for flat in others]).to(_WIDE)
            is_chief = self._workers.communicator.rank == 0
            counters = [data if is_chief else torch.zeros_like(data)]
        means, chosen = _mean(
            [[flat.parts[i] for flat in floats] for i in range(len(self._places))],
            weights,
            self._workers,
            counters,
        )
        for flat, mean in zip(floats, means, strict=True):
            flat.whole.copy_(mean)
        if self._workers.are_many:
            # Bytes, which came as numbers.
            parts = chosen.to(torch.uint8).split([flat.whole.nbytes for flat in others])
            for flat, part in zip(others, parts, strict=True):
                flat.whole.view(torch.uint8).copy_(part)
        else:
            for flat in others:
                flat.whole.copy_(flat.parts[0])
        for flat in self.flats.values():
            flat.write()


def mean_of(parts: Sequence[Tensor], weights: Sequence[float], workers: Workers) -> Tensor:
    """Returns the mean of one dense buffer over the replicas of all workers that had samples."""
    first = parts[0]
    (mean,), _ = _mean([[part.reshape(-1)] for part in parts], weights, workers, [])
    return mean.to(first.dtype).view(first.shape).to(first.device)


def _mean(
    parts: Sequence[Sequence[Tensor]],
    weights: Sequence[float],
    workers: Workers,
    chosen: Sequence[Tensor],
) -> tuple[list[Tensor], Tensor]:
    """Returns the mean of each vector over replicas, in float64, and the sum of `chosen`."""
    home = parts[0][0].device if parts[0] else torch.device("cpu")
    place = home if workers.communicator.takes(home) else torch.device("cpu")
    packs = []
    for i, (own, weight) in enumerate(zip(parts, weights, strict=True)):
        # Not made of a Python list, for which a GPU would be waited for.
        ones = torch.full((1,), float(weight != 0), dtype=_WIDE, device=place)
        vectors = [
            part.to(place) if weight else torch.zeros_like(part, device=place) for part in own
        ]
        rest = [one.to(place) if i == 0 else torch.zeros_like(one, device=place) for one in chosen]
        packs.append(torch.cat([ones, *vectors, *rest]))
    total = _combined(ReduceOp.SUM, packs, workers)
    sizes = [part.numel() for part in parts[0]]
    sums = total[1 : 1 + sum(sizes)]
    means = list((sums / total[0]).split(sizes)) if sizes else []
    for i, size in enumerate(sizes):
        if parts[0][i].dtype == _WIDE and size:
            vectors = [own[i].to(place) for own in parts]
            means[i] = _exact(means[i], vectors, weights, workers)
    return means, total[1 + sum(sizes) :]


def _exact(
    mean: Tensor, vectors: Sequence[Tensor], weights: Sequence[float], workers: Workers
) -> Tensor:
    """Keeps the bits of values on which all agree, where float64 itself is to be averaged."""
    ends = []
    for op, neutral in ((ReduceOp.MIN, torch.inf), (ReduceOp.MAX, -torch.inf)):
        given = [
            vector if weight else torch.full_like(vector, neutral)
            for vector, weight in zip(vectors, weights, strict=True)
        ]
        ends.append(_combined(op, given, workers))
    return torch.where(ends[0] == ends[1], ends[0], mean)


def _combined(op: ReduceOp, packs: Sequence[Tensor], workers: Workers) -> Tensor:
    """Combines a vector per replica over the replicas of all workers, in the order of all sums."""
    shape = workers.layout(len(packs)).terms
    terms = [reduce_batch(op, [tuple(packs[own])], [1])[0][0] for own in shape.own]
    if workers.are_many:
        shape.all_reduce(workers.communicator, op, terms)
    return terms[0]


@dataclass(eq=False)
class LooseBuffer:
    """A buffer on its own: the primary's, each replica's, and how often each had been written to.

    Of some, torch does not count all writes: observers of quantization write without, and `.data`
    does. So their values are compared. On many workers, where all must find the same, they count as
    written while the modules that own them train.
    """

    primary: Tensor
    is_compared: bool
    owners: list[int]
    stamp: tuple[int, int] = (-1, -1)
    parts: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def give(self, places: Sequence[torch.device], *, is_forced: bool) -> bool:
        """Gives the replicas what the primary has, and returns whether they need other tensors."""
        stamp = (self.primary.data_ptr(), version_of(self.primary))
        if not is_forced and stamp == self.stamp:
            return False
        can_stay = bool(self.parts) and all(is_like(part, self.primary) for part in self.parts)
        if can_stay:
            for part in self.parts:
                part.copy_(self.primary.detach())
        else:
            self.parts = [self.primary.detach().to(place, copy=True) for place in places]
        self.versions = [version_of(part) for part in self.parts]
        self.stamp = stamp
        return not can_stay

    def is_written(self, *, by_others: bool) -> bool:
        """Whether a replica has written to it, without a resize; `by_others`: or may have."""
        if any(part.shape != self.primary.shape for part in self.parts):
            return False
        if self.versions != [version_of(part) for part in self.parts]:
            return True
        if not self.is_compared:
            return False
        return by_others or not all(torch.equal(p.cpu(), self.primary.cpu()) for p in self.parts)


class Written(NamedTuple):
    """What replicas have written to their buffers.

    Attributes:
        replaced: Buffers of replicas, and like tensors that replicas have put in their place.
        others: Those that became something else, by the place of their module, and their name.
        loose: The large ones that were written to.
        are_flats: Whether a small one was.
    """

    replaced: list[tuple[Tensor, Tensor]]
    others: list[tuple[int, str]]
    loose: list[LooseBuffer]
    are_flats: bool


def is_like(found: Tensor | None, given: Tensor | None) -> bool:
    """Whether a tensor can stand in the place of another one."""
    if found is None or given is None:
        return found is given
    return (
        found.shape == given.shape and found.dtype == given.dtype and found.layout is given.layout
    )


class Restructured(NamedTuple):
    """What is to be done to the primaries, so that they have what their replicas have."""

    modules: Sequence[nn.Module | None]
    primaries: Sequence[dict[str, Tensor | None]]
    attributes: Sequence[Sequence[dict[str, Any]]]
    keys: Sequence[tuple[int, str]]

    def settle(self, weights: Sequence[float], workers: Workers) -> None:
        """Changes the primaries."""
        self._check(workers)
        for module, name in self.keys:
            buffers = [own[module]["_buffers"] for own in self.attributes]
            primary = self.primaries[module]
            if name not in buffers[0]:
                primary.pop(name, None)
                continue
            parts = [own[name] for own in buffers]
            if parts[0] is None:
                primary[name] = None
            elif parts[0].is_floating_point() and parts[0].layout is torch.strided:
                primary[name] = mean_of([part.detach() for part in parts], weights, workers)
            else:
                primary[name] = workers.of_chief(parts[0].detach().clone())
            self._set_persistence(module, name)

    def _set_persistence(self, module: int, name: str) -> None:
        target = self.modules[module]
        if target is not None:
            own: set[str] = object.__getattribute__(target, "__dict__")[_PERSISTENCE]
            is_kept = name not in self.attributes[0][module][_PERSISTENCE]
            (own.discard if is_kept else own.add)(name)

    def _check(self, workers: Workers) -> None:
        """Raises unless all replicas of all workers have the same buffers."""
        found = [[*key, *self._kinds(*key)] for key in self.keys]
        data = torch.tensor(list(json.dumps(found).encode()), dtype=torch.uint8)
        everybody = [json.loads(bytes(one.tolist())) for one in workers.gather(data)]
        for entries in zip(*everybody, strict=False):
            kinds = [kind for entry in entries for kind in entry[2:]]
            keys = {tuple(entry[:2]) for entry in entries}
            if len(keys) > 1 or len(set(kinds)) > 1:
                raise _mismatch(self._name_of(*entries[0][:2]), kinds)
        if len({len(one) for one in everybody}) > 1:
            raise _mismatch("Some", [f"{len(one)} of another kind" for one in everybody])

    def _kinds(self, module: int, name: str) -> list[str]:
        return [_kind(own[module]["_buffers"].get(name)) for own in self.attributes]

    def _name_of(self, module: int, name: str) -> str:
        return f"{type(self.modules[module]).__name__}.{name}"


def _kind(buffer: Tensor | None) -> str:
    if buffer is None:
        return _ABSENT
    return f"{str(buffer.dtype).removeprefix('torch.')} of shape {tuple(buffer.shape)}"


def _mismatch(what: str, kinds: Sequence[str]) -> ReplicaMismatchError:
    found = ", ".join(f"{kind} on replica {i}" for i, kind in enumerate(kinds))
    return ReplicaMismatchError(
        f"The step set the buffer {what} to different values on the replicas: {found}. All "
        "replicas share a buffer after `run`. Keep the state of one replica, such as a cache, in a "
        "plain attribute: `self.cache = ...` without `register_buffer`."
    )
