"""A job that goes on with the same bits when it loses workers.

Every run ends with a *commit*: the workers tell each other that they have come to its end, together
with its small results. Nobody passes the commit before all have entered it. So where a worker is
lost, either nobody has passed, and all survivors undo the run and make it again, or somebody has,
and the run is complete everywhere. In both cases the replicas are divided again.
"""

from __future__ import annotations

import logging
import operator
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor

from unisono.cluster.elastic import ElasticMembers, Met, share_state
from unisono.devices import Device, spread
from unisono.engines import CallerThread
from unisono.errors import (
    CommunicationError,
    ContextError,
    JobMismatchError,
    UnequalCollectivesError,
    UnsupportedError,
)
from unisono.reductions import (
    CrossDeviceOps,
    dealt,
)
from unisono.strategies.elastic_account import account
from unisono.strategies.elastic_values import ElasticValues
from unisono.strategies.joining import forget_elastic, remember_elastic
from unisono.strategies.known_results import packed, unpacked
from unisono.values import (
    PerReplica,
    flatten,
    map_leaves,
)
from unisono.variables import Snapshot

if TYPE_CHECKING:
    from unisono.strategies.multi_worker import MultiWorkerExtended

T = TypeVar("T")

_log = logging.getLogger("unisono")
_FAULTS_OF_THE_PROGRAM = (UnequalCollectivesError, JobMismatchError)


class Admission(Protocol):
    """What a worker that joins needs to know. `Checkpoint` implements it."""

    def state_of(self) -> dict[str, Any]:
        """Returns the state as this worker has it."""

    def take(self, state: dict[str, Any]) -> None:
        """Takes over what `state_of` has returned on another worker."""

    def holds(self, one: object) -> bool:
        """Whether it has the state of an input."""


class ElasticJob(ElasticValues):
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
        self.members = members
        self._devices = devices
        self._make_ops = make_ops
        self.generation = members.met.generation
        self._numbers = members.met.members
        self._snapshot = Snapshot(extended.mirrors)
        extended.mirrors.shared.transact = self.transact
        self._inputs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._num_commits = 0
        # What came with the last commit, by rank.
        self._rows: list[Tensor] = []
        self._is_busy = False
        # What is known to those who join. None of them is let in before it is set.
        self._admission: Admission | None = None
        # What they get: the state before the run that comes next, until that is complete.
        self._boundary: Any = None
        # Whether somebody has asked one of the workers to be let in.
        self._is_asked = False
        # On a worker that has joined: what it got, and whether it has not trained with it yet.
        self._arrival: dict[str, Any] | None = None
        self.is_arriving = bool(members.met.stateless)
        # By the code of a step, whether it adds to the gradients that earlier runs left.
        self._adds: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def add_input(self, given: Any) -> None:
        """Lets an input know when this worker gets other replicas."""
        self._inputs.add(given)

    def close(self) -> None:
        """Leaves the other workers."""
        forget_elastic(self._extended.workers)
        self.members.leave()

    def begin(self) -> None:
        """When the strategy is made. A worker that joins gets what the others have."""
        remember_elastic(self._extended.workers)
        if self.is_arriving:
            start, met = time.monotonic(), self.members.met
            while self._arrival is None:
                try:
                    self._arrival = share_state(met.communicator, None, met.source)["state"]
                except CommunicationError as error:
                    met = self.members.meet_again(None, error)
            (self._num_commits,) = met.position
            self._extended.mirrors.shared.is_silent = True
            if met.generation != self.generation:
                self._move(met, start, is_undone=False)

    def admit(self, admission: Admission) -> None:
        """Lets workers join from now on; on one that has joined, takes over what it got."""
        self._admission = admission
        if self._arrival is not None:
            admission.take(self._arrival["state"])
            self._snapshot.take_gradients(self._arrival["gradients"])
            self._arrival = None

    def at_boundary(self, given: Any) -> None:
        """Before the next batch of an input is taken: lets workers in that want to join."""
        if self.is_arriving:
            self._arrive()
        if not self._is_asked or self._admission is None or not self._admission.holds(given):
            return
        self._is_asked = False
        start = time.monotonic()
        state = {"state": self._admission.state_of(), "gradients": self._snapshot.gradients()}
        # If a worker is lost meanwhile, those who join may need it when others run already.
        self._boundary = map_leaves(_kept, state)
        met, _ = self._meet(None, admits=True)
        self._move(met, start, is_undone=False)

    def _arrive(self) -> None:
        """The worker trains with the others from now on."""
        if self._arrival is not None:
            raise ContextError(
                "This worker has joined a job that runs, but the program has not taken over its "
                "state. Call `strategy.experimental_admit(checkpoint)` before the loop."
            )
        self.is_arriving = self._extended.mirrors.shared.is_silent = False

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Makes a run, if need be more than once; see `Strategy.run`."""
        if self.is_arriving:
            self._arrive()
        given = (tuple(args), kwargs)
        arguments, rebuild = flatten(given)
        lost = _lost_argument(arguments)
        code = getattr(fn, "__code__", None)
        gradients = self._extended.gradients
        had_unreduced = gradients.has_unreduced
        keeps = self._adds.get(code, True) if code is not None else True
        self._snapshot.begin(keep_gradients=keeps)
        results: list[Any] = []
        leaves: list[PerReplica] = []
        postponed = self._extended.mirrors.postponed

        def work() -> Tensor:
            now = [self._relaid_leaf(leaf) for leaf in arguments]
            is_same = all(map(operator.is_, now, arguments))
            args, kwargs = given if is_same else rebuild(now)
            postponed.is_on = True
            results[:] = [self._extended._run_step(fn, args, kwargs)]
            leaves[:] = _distributed(results[0])
            postponed.look_at([leaf.values for leaf in leaves])
            return packed(leaves, is_asked=self.members.newcomers())

        def complete() -> None:
            self._snapshot.end()
            postponed.make()

        def undo() -> None:
            if not lost and _lost_argument(arguments):
                raise UnsupportedError(
                    "A worker was lost, and the run cannot be made again, because the step writes "
                    "to its input. Write to a copy: `x = x.clone()`."
                )
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
                    "gradients of earlier runs, which were not kept. Clear and "
                    "reduce gradients in the run that computes them, or go on from a checkpoint."
                )
            postponed.forget()
            self._snapshot.restore()
            self._extended._undo_drawing()

        try:
            with _Busy(self):
                generation, known = self._transact(work, undo, complete)
        finally:
            self._snapshot.end()
            postponed.forget()
            postponed.is_on = False
        if code is not None:
            self._adds[code] = self._extended.gradients.has_added
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
        self,
        work: Callable[[], Tensor],
        undo: Callable[[], None],
        complete: Callable[[], None] = lambda: None,
    ) -> tuple[int, list[tuple[Any, ...] | None]]:
        """Does the work, if need be more than once.

        Args:
            work: What is done. It returns what this worker tells about it.
            undo: Makes everything what it was before.
            complete: Does what cannot be undone, when all workers have done the work.

        Returns:
            The generation in which the work was done, and what all told about it.
        """
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
                self._rows, self._boundary = rows, None
                complete()
                known, is_asked = unpacked(rows)
                self._is_asked = self._is_asked or is_asked
                return generation, known
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
            else:
                complete()
            self._move(met, start, is_undone=handed is None)
            if handed is not None:
                return generation, unpacked(handed)[0]

    def _meet(
        self, error: CommunicationError | None, *, admits: bool = False
    ) -> tuple[Met, list[Tensor] | None]:
        """Survivors meet, and tell those who lack something.

        Args:
            error: What has happened, if it has.
            admits: Whether workers are let in that want to join.

        Returns:
            What they have agreed on. What all said with the last commit, if this worker has not
            passed it and another one has.
        """
        while True:
            met = self.members.meet_again((self._num_commits,), error, admits=admits)
            if len(set(met.positions)) == 1:
                return met, None
            given = {"rows": self._rows, "is_asked": self._is_asked, "state": self._boundary}
            try:
                told: Any = share_state(met.communicator, given, met.source)
            except CommunicationError as again:
                error, admits = again, False
                continue
            self._is_asked = told["is_asked"]
            if met.position == (self._num_commits,):
                return met, None
            (self._num_commits,), self._rows = met.position, told["rows"]
            return met, told["rows"]

    def _move(self, met: Met, start: float, *, is_undone: bool) -> None:
        """Takes the replicas that this worker has now."""
        extended = self._extended
        before, numbers = extended.layout, self._numbers
        counts = dealt(before.total, len(met.members))
        devices = spread(self._devices, counts[met.rank])
        extended._relayout(devices, self._make_ops(devices), met.communicator, counts)
        self.generation = met.generation
        for one in list(self._inputs):
            one._move(devices, extended.strategy._input_context, met.generation)
        _log.warning(
            "%s %s It took %.1f s.",
            account(before, numbers, extended.layout, met),
            "The last run was undone, and is made again." if is_undone else "No run was undone.",
            time.monotonic() - start,
        )
        self._numbers = met.members


class _Busy:
    """In the block, what workers do together is part of one run."""

    def __init__(self, job: ElasticJob) -> None:
        self._job = job

    def __enter__(self) -> None:
        self._job._is_busy = True

    def __exit__(self, *error: object) -> None:
        self._job._is_busy = False


def _kept(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf


def _distributed(structure: Any) -> list[PerReplica]:
    return [leaf for leaf in flatten(structure)[0] if isinstance(leaf, PerReplica)]


def _lost_argument(leaves: Sequence[Any]) -> str:
    """Names an argument of which this worker does not know the components of all replicas."""
    for leaf in leaves:
        if isinstance(leaf, PerReplica) and leaf.known_everywhere is None:
            return f"a `PerReplica` of {len(leaf.values)} values"
    return ""
