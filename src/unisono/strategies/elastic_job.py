"""A job that goes on with the same bits when it loses workers.

Every run ends with a *commit*: the workers tell each other that they have come to its end, together
with its small results. Nobody passes the commit before all have entered it. So where a worker is
lost, either nobody has passed, and all survivors undo the run and make it again, or somebody has,
and the run is complete everywhere. In both cases the replicas are dealt anew.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from unisono.cluster.elastic import ElasticMembers, Met, share_state
from unisono.devices import Device, cpu_slots, spread, this_machine
from unisono.engines import CallerThread
from unisono.errors import (
    CommunicationError,
    JobMismatchError,
    UnequalCollectivesError,
    UnsupportedError,
)
from unisono.input import copied
from unisono.kernels import check_gather
from unisono.options import ReduceOp
from unisono.reductions import (
    CrossDeviceOps,
    Destinations,
    ReductionToOneDevice,
    ReplicaLayout,
    dealt,
)
from unisono.strategies.known_results import packed, unpacked
from unisono.values import (
    Mirrored,
    PerReplica,
    as_tensor,
    factors_of,
    flatten,
    map_leaves,
    weighed,
)
from unisono.variables import Snapshot

if TYPE_CHECKING:
    from unisono.strategies.multi_worker import MultiWorkerExtended

T = TypeVar("T")

_log = logging.getLogger("unisono")
_FAULTS_OF_THE_PROGRAM = (UnequalCollectivesError, JobMismatchError)


class ElasticJob:
    """Makes runs that survive the loss of workers.

    Args:
        extended: The replicas of this worker.
        members: The workers.
        devices: The devices of this worker, which its replicas share.
        make_ops: Returns what reduces between the devices of replicas.

    Attributes:
        generation: Which workers there are: it changes with them.
    """

    def __init__(
        self,
        extended: MultiWorkerExtended,
        members: ElasticMembers,
        devices: tuple[Device, ...],
        make_ops: Callable[[tuple[Device, ...]], CrossDeviceOps],
    ) -> None:
        self._extended = extended
        self._members = members
        self._devices = devices
        self._make_ops = make_ops
        self.generation = members.met.generation
        self._numbers = members.met.members
        self._snapshot = Snapshot(extended.mirrors)
        extended.mirrors.shared.transact = self.transact
        self._inputs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._num_commits = 0
        # What was told with the last commit, by rank.
        self._rows: list[Tensor] = []
        self._is_busy = False
        # By the code of a step, whether it adds to the gradients that earlier runs left.
        self._adds: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def add_input(self, given: Any) -> None:
        """Lets an input know when this worker gets other replicas."""
        self._inputs.add(given)

    def close(self) -> None:
        """Leaves the other workers."""
        self._members.leave()

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Makes a run, if need be more than once; see `Strategy.run`."""
        given = (tuple(args), kwargs)
        # Checked before the run: a step may write to its input, and gets another copy then.
        lost = _lost_arguments(given)
        code = getattr(fn, "__code__", None)
        gradients = self._extended.gradients
        had_unreduced = gradients.has_unreduced
        keeps = self._adds.get(code, True) if code is not None else True
        self._snapshot.begin(keep_gradients=keeps)
        results: list[Any] = []

        def work() -> Tensor:
            args, kwargs = self._relaid(given)
            results[:] = [self._extended._run_step(fn, args, kwargs)]
            return packed(_distributed(results[0]))

        def undo() -> None:
            if lost:
                raise UnsupportedError(
                    f"A worker was lost, and its replicas cannot go on: {lost} was given to `run`, "
                    "and only the lost worker had its components. Pass what comes from "
                    "`experimental_distribute_dataset`, or plain tensors, and compute the rest in "
                    "the step."
                )
            if had_unreduced or (self._extended.gradients.has_added and not keeps):
                raise UnsupportedError(
                    "A worker was lost, and the run cannot be made again, because it adds to "
                    "gradients that earlier runs have left and that nobody has kept. Clear and "
                    "reduce gradients in the run that computes them, or go on from a checkpoint."
                )
            self._snapshot.restore()
            self._extended.undo_drawing()

        try:
            with _Busy(self):
                generation, known = self._transact(work, undo)
        finally:
            self._snapshot.end()
        if code is not None:
            self._adds[code] = self._extended.gradients.has_added
        leaves = _distributed(results[0])
        for leaf, of_all in zip(leaves, known or [None] * len(leaves), strict=True):
            leaf.note_origin(generation, of_all)
        if generation == self.generation:
            return results[0]
        return map_leaves(self._relaid_if_known, results[0])

    def transact(self, work: Callable[[], T], undo: Callable[[], None]) -> T:
        """Does what all workers do together, again if a worker is lost meanwhile.

        Args:
            work: What they do. Within a run, it is a part of the run.
            undo: Makes everything what it was before.
        """
        if self._is_busy:
            return work()
        results: list[T] = []

        def work_once() -> Tensor:
            results[:] = [work()]
            return packed(())

        self._extended.mirrors.shared.note()
        with _Busy(self):
            self._transact(work_once, undo)
        return results[0]

    def _transact(
        self, work: Callable[[], Tensor], undo: Callable[[], None]
    ) -> tuple[int, list[tuple[Any, ...] | None]]:
        """Returns the generation in which the work was done, and what all told about it."""
        caller = CallerThread()
        while True:
            generation = self.generation
            failure: CommunicationError | None = None
            try:
                rows = self._extended.workers.gather(work())
            except CommunicationError as error:
                if isinstance(error, _FAULTS_OF_THE_PROGRAM):
                    raise
                failure = error
            if failure is None:
                self._num_commits += 1
                self._rows = rows
                return generation, unpacked(rows)
            caller.restore()
            start = time.monotonic()
            try:
                met, handed = self._meet(failure)
            except BaseException:
                undo()
                raise
            finally:
                failure = None
            if handed is None:
                undo()
            self._move(met, start, is_undone=handed is None)
            if handed is not None:
                return generation, unpacked(handed)

    def _meet(self, error: CommunicationError) -> tuple[Met, list[Tensor] | None]:
        """Survivors meet. Returns what was told with the commit, if somebody has passed it."""
        while True:
            met = self._members.meet_again((self._num_commits,), error)
            if len(set(met.positions)) == 1:
                return met, None
            try:
                rows: Any = share_state(met.communicator, list(self._rows), met.source)
            except CommunicationError as again:
                error = again
                continue
            if met.position == (self._num_commits,):
                return met, None
            (self._num_commits,), self._rows = met.position, rows
            return met, rows

    def _move(self, met: Met, start: float, *, is_undone: bool) -> None:
        """Takes the replicas that are dealt to this worker now."""
        extended = self._extended
        before, numbers = extended.layout, self._numbers
        counts = dealt(before.total, len(met.members))
        devices = spread(self._devices, counts[met.rank])
        extended.relayout(devices, self._make_ops(devices), met.communicator, counts)
        self.generation = met.generation
        for one in list(self._inputs):
            one.move(devices, extended.strategy._input_context, met.generation)
        _log.warning(
            "%s The last run was %s. It took %.1f s.",
            _account(before, numbers, extended.layout, met),
            "undone, and is made again" if is_undone else "complete",
            time.monotonic() - start,
        )
        self._numbers = met.members

    def reduce(
        self, op: ReduceOp, value: Any, destinations: Destinations, reduce: Callable[[], T]
    ) -> Any:
        """Reduces a value over all replicas: here, if all workers know the components of all.

        Args:
            op: How.
            value: The value.
            destinations: Where the result goes.
            reduce: Reduces it together with the other workers.
        """
        if not isinstance(value, PerReplica) or self._is_busy:
            return self.transact(reduce, _nothing)
        known = value.known_everywhere
        if known is None:
            return self.transact(lambda: self._checked(value) and reduce(), _nothing)
        counts = value.counts
        if counts is not None and len(set(counts)) > 1:
            known = weighed(op, known, factors_of(op, counts))
        everywhere = PerReplica.placed(known, cpu_slots(len(known)))
        return ReductionToOneDevice().reduce(op, everywhere, destinations)

    def gather(self, value: Any, axis: int, gather: Callable[[Any, int], Any]) -> Any:
        """Concatenates a value of all replicas: here, if all workers know the components of all.

        Args:
            value: The value.
            axis: The dimension along which its components are put together.
            gather: Does it together with the other workers.
        """
        if not isinstance(value, PerReplica) or self._is_busy:
            return self.transact(lambda: gather(value, axis), _nothing)
        known = value.known_everywhere
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

    def _checked(self, value: PerReplica) -> bool:
        """Returns True if a value has the components of the replicas that this worker has now."""
        if value.origin is not None and value.origin.generation != self.generation:
            raise UnsupportedError(
                "A worker was lost after the run that returned this value, and the components of "
                "its replicas with it. Reduce or gather large values in the step, with "
                "`all_reduce` or `all_gather` of the replica context."
            )
        return True

    def _relaid(self, structure: Any) -> Any:
        """Returns arguments of a run with the components of the replicas that there are now."""
        leaves, rebuild = flatten(structure)
        now = [self._relaid_leaf(leaf) for leaf in leaves]
        if all(one is leaf for one, leaf in zip(now, leaves, strict=True)):
            return structure
        return rebuild(now)

    def _relaid_leaf(self, leaf: Any) -> Any:
        extended = self._extended
        devices = extended.worker_devices
        if isinstance(leaf, Mirrored) and len(leaf.values) != len(devices):
            return Mirrored.placed(self._placed([leaf.values[0]] * len(devices)), devices)
        if not isinstance(leaf, PerReplica) or leaf.origin is None:
            return leaf
        if leaf.origin.generation == self.generation:
            return leaf
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
            for part, place in zip(map(copied, parts), places, strict=True)
        )


def _to(place: torch.device, leaf: Any) -> Any:
    return leaf.to(place) if isinstance(leaf, Tensor) else leaf


class _Busy:
    """In the block, what workers do together is part of one run."""

    def __init__(self, job: ElasticJob) -> None:
        self._job = job

    def __enter__(self) -> None:
        self._job._is_busy = True

    def __exit__(self, *error: object) -> None:
        self._job._is_busy = False


def _nothing() -> None:
    """Undoes what has changed nothing."""


def _distributed(structure: Any) -> list[PerReplica]:
    return [leaf for leaf in flatten(structure)[0] if isinstance(leaf, PerReplica)]


def _lost_arguments(given: Any) -> str:
    """Names an argument of which this worker does not know the components of all replicas."""
    for leaf in _distributed(given):
        if leaf.known_everywhere is None:
            return f"a `PerReplica` of {len(leaf.values)} values"
    return ""


def _account(before: ReplicaLayout, numbers: Sequence[int], now: ReplicaLayout, met: Met) -> str:
    """Says who was lost, and who has taken over what."""
    lost = [number for number in numbers if number not in met.members]
    orphans = [
        replica
        for number, own in zip(numbers, before.ranges, strict=True)
        if number in lost
        for replica in own
    ]
    heirs = {
        number: [replica for replica in orphans if replica in own]
        for number, own in zip(met.members, now.ranges, strict=True)
    }
    taken = "; ".join(
        f"worker {number} takes over {', '.join(map(str, own))}"
        for number, own in heirs.items()
        if own
    )
    who = (
        f"Lost worker {', '.join(map(str, lost))}, of {len(numbers)}."
        if lost
        else "The workers have met again."
    )
    return f"{who} Of its replicas, {taken}." if taken else who
