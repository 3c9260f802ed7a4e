"""Values of an elastic job, whose workers may get other replicas after a value was made."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from unisono.devices import cpu_slots, this_machine
from unisono.errors import UnsupportedError
from unisono.input import copied
from unisono.input.split.own_data import filled
from unisono.kernels import check_gather
from unisono.options import ReduceOp
from unisono.reductions import Destinations, ReductionToOneDevice, ReplicaLayout
from unisono.values import Mirrored, PerReplica, as_tensor, factors_of, flatten, map_leaves, weighed
from unisono.workers.elastic.results import packed

if TYPE_CHECKING:
    from unisono.cluster.elastic import ElasticMembers
    from unisono.workers.connected import ConnectedWorkers
    from unisono.workers.multi_worker import MultiWorkerExtended

T = TypeVar("T")

# They remember how values go from some devices to others.
_HERE = ReductionToOneDevice()
_slots = functools.cache(cpu_slots)


class ElasticValues:
    """The part of an elastic job that is about values with a component per replica."""

    if TYPE_CHECKING:
        generation: int
        _extended: MultiWorkerExtended
        _inputs: weakref.WeakSet[Any]
        _numbers: tuple[int, ...]
        _is_busy: bool
        is_arriving: bool

        members: ElasticMembers

        def _transact(
            self, work: Callable[[], Tensor], undo: Callable[[], None]
        ) -> tuple[int, list[tuple[Any, ...] | None]]:
            """See `ElasticJob._transact`."""

        def transact(self, work: Callable[[], T], undo: Callable[[], None]) -> T:
            """See `ElasticJob.transact`."""

    def reduce(
        self, op: ReduceOp, value: Any, destinations: Destinations, reduce: Callable[[], T]
    ) -> Any:
        """Reduces a value over all replicas: here, if all workers know the components of all.

        Otherwise `reduce` does it, together with the other workers.
        """
        known = self._known(value)
        if known is None:
            return self.transact(lambda: self._checked(value) and reduce(), _nothing)
        counts = value.counts
        if counts is not None and len(set(counts)) > 1:
            known = weighed(op, known, factors_of(op, counts))
        everywhere = PerReplica.placed(known, _slots(len(known)))
        return _HERE.reduce(op, everywhere, destinations)

    def gather(self, value: Any, axis: int, gather: Callable[[Any, int], Any]) -> Any:
        """Concatenates a value of all replicas: here, if all workers know the components of all.

        Otherwise `gather` does it, together with the other workers.
        """
        known = self._known(value)
        if known is None:
            return self.transact(lambda: self._checked(value) and gather(value, axis), _nothing)
        counts = value.counts or (1,) * len(known)
        tensors = [as_tensor(component) for component in known]
        check_gather(tensors, axis)
        parts = [
            tensor if count else tensor.narrow(axis, 0, 0)
            for tensor, count in zip(tensors, counts, strict=True)
        ]
        return torch.cat(parts, dim=axis).to(this_machine().torch_device(self._extended.host))

    @contextmanager
    def busy(self) -> Iterator[None]:
        """In the block, what workers do together is part of one run."""
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def add_input(self, given: Any) -> None:
        """Lets an input know when this worker gets other replicas."""
        self._inputs.add(given)

    @property
    def workers(self) -> ConnectedWorkers:
        """The workers that there are now."""
        return self._extended.workers

    @property
    def layout(self) -> ReplicaLayout:
        """Which replicas each worker has."""
        return self._extended.layout

    @property
    def owners(self) -> tuple[int, ...]:
        """The number of the worker that each replica has. A worker keeps its number."""
        pairs = zip(self.members.met.members, self.layout.counts, strict=True)
        return tuple(number for number, count in pairs for _ in range(count))

    def tell(
        self, own: Callable[[], Sequence[int]], undo: Callable[[], None]
    ) -> tuple[int, tuple[int, ...]]:
        """All workers tell each other the numbers that `own` returns; see `transact`.

        Returns the generation of the workers that have told, and all their numbers by rank.
        """
        generation, known = self._transact(lambda: packed([PerReplica(own())]), undo)
        assert known[0] is not None
        return generation, known[0]

    def of_chief(self, tensor: Tensor) -> Tensor:
        """Returns the value that the chief has. A worker that joins gets all values later."""
        if self.is_arriving:
            return tensor
        return self.transact(lambda: self._extended.workers.of_chief(tensor), _nothing)

    def _all_know(self) -> bool:
        """Before workers leave: all say that they know it, and get what communication hooks keep.

        One that is cut off as it learns that it leaves would go on otherwise, and so would those
        that go on without it.

        Returns:
            Whether no worker was lost meanwhile. If one was, the others do it again.
        """
        hooks, before = self._extended.replica_hooks, self.generation
        if hooks is None or hooks.are_known:
            self.transact(_nothing, _nothing)
        else:
            self.transact(lambda: hooks.meet(self.workers.communicator, self._numbers), _nothing)
        return self.generation == before

    def _known(self, value: Any) -> tuple[Any, ...] | None:
        is_known = isinstance(value, PerReplica) and not self._is_busy
        return value.known_everywhere if is_known else None

    def _checked(self, value: Any) -> bool:
        """Returns True if a value has the components of the replicas that this worker has now."""
        origin = value.origin if isinstance(value, PerReplica) else None
        if origin is not None and origin.generation != self.generation:
            raise UnsupportedError(
                "A worker was lost after the run that returned this value, and the components of "
                "its replicas with it. Reduce or gather large values in the step, with "
                "`all_reduce` or `all_gather` of the replica context."
            )
        return True

    def _relaid(self, leaves: Sequence[Any], rebuild: Callable[[Sequence[Any]], T]) -> T | None:
        """Returns arguments with the components of the replicas there are now, if that changes."""
        now = [self._relaid_leaf(leaf) for leaf in leaves]
        return None if all(map(operator.is_, now, leaves)) else rebuild(now)

    def _relaid_leaf(self, leaf: Any) -> Any:
        extended = self._extended
        devices = extended.worker_devices
        if isinstance(leaf, Mirrored) and len(leaf.values) != len(devices):
            return Mirrored.placed(self._placed([leaf.values[0]] * len(devices)), devices)
        if not isinstance(leaf, PerReplica) or leaf.origin is None:
            return leaf
        if leaf.origin.generation == self.generation:
            return leaf
        if leaf.origin.step is not None:
            parts = self._placed(filled(leaf.values, len(devices)))
            counts = leaf.origin.step.counts_for(self.owners)
            return PerReplica.placed(parts, devices, counts, is_input=leaf.is_input)
        of_all = leaf.origin.of_all
        if of_all is None:
            self._checked(leaf)
        assert of_all is not None
        own = extended.layout.own
        parts = self._placed(of_all[own.start : own.stop])
        value = PerReplica.placed(parts, devices, leaf.counts, is_input=leaf.is_input)
        value.note_origin(self.generation, of_all)
        return value

    def _relaid_if_known(self, leaf: Any) -> Any:
        is_known = not isinstance(leaf, PerReplica) or leaf.known_everywhere is not None
        return self._relaid_leaf(leaf) if is_known else leaf

    def _placed(self, parts: Sequence[Any]) -> tuple[Any, ...]:
        machine = this_machine()
        places = map(machine.torch_device, self._extended.worker_devices)
        return tuple(
            map_leaves(functools.partial(_to, place), part)
            for part, place in zip(parts, places, strict=True)
        )


def _to(place: torch.device, leaf: Any) -> Any:
    return leaf.to(place) if isinstance(leaf, Tensor) else copied(leaf)


def in_host_memory(leaf: Any) -> Any:
    """Returns a copy of a tensor there; what is no tensor stays what it is."""
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf


def _nothing() -> None:
    """Undoes what has changed nothing."""


def distributed(structure: Any) -> list[PerReplica]:
    """Returns the leaves of a structure that have a component per replica."""
    return [leaf for leaf in flatten(structure)[0] if isinstance(leaf, PerReplica)]


def lost_arguments(leaves: Sequence[Any]) -> str:
    """Names an argument of a run whose components other workers would not have."""
    for leaf in leaves:
        if isinstance(leaf, PerReplica) and not leaf.can_be_laid_out:
            return f"a `PerReplica` of {len(leaf.values)} values"
    return ""


def check_again(leaves: Sequence[Any], lost: str) -> None:
    """Raises if a run cannot be made again, where `lost` was found in its arguments before it."""
    if lost:
        raise UnsupportedError(
            f"A worker was lost, and its replicas cannot go on: {lost} was given to `run`, "
            "and only the lost worker had its components. Pass what comes from "
            "`experimental_distribute_dataset`, or plain tensors, and compute the rest in "
            "the step."
        )
    if lost_arguments(leaves):
        raise UnsupportedError(
            "A worker was lost, and the run cannot be made again, because the step writes "
            "to its input. Write to a copy: `x = x.clone()`."
        )
