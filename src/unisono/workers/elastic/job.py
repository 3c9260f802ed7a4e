"""A job that goes on with the same bits when it loses workers.

Every run ends with a *commit*: the workers tell each other that they have come to its end, together
with its small results. Nobody passes the commit before all have entered it. So where a worker is
lost, either nobody has passed, and all survivors undo the run and make it again, or somebody has,
and the run is complete everywhere. In both cases the replicas are divided again. The update of a
run waits for its commit where it can; see `Postponed`.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from unisono.cluster.elastic import ElasticMembers, Met
from unisono.communicators.wire import share_state
from unisono.devices import Device, spread
from unisono.engines import ThreadState
from unisono.errors import (
    CommunicationError,
    ContextError,
    JobMismatchError,
    UnequalCollectivesError,
    UnsupportedError,
)
from unisono.modules.snapshot import Postponed, Snapshot
from unisono.reductions import CrossDeviceOps, dealt
from unisono.values import PerReplica, flatten, map_leaves
from unisono.workers.elastic.leaving import Departures, account
from unisono.workers.elastic.results import Told, packed, unpacked
from unisono.workers.elastic.values import (
    ElasticValues,
    check_again,
    distributed,
    in_host_memory,
    lost_arguments,
)
from unisono.workers.elastic.variables import KeptVariables
from unisono.workers.joining import forget_elastic, jobs
from unisono.workers.replica_hooks import Contents, exchanged

if TYPE_CHECKING:
    from unisono.checkpoints.checkpoint import Checkpoint
    from unisono.workers.multi_worker import MultiWorkerExtended

T = TypeVar("T")

_log = logging.getLogger("unisono")
_FAULTS_OF_THE_PROGRAM = (UnequalCollectivesError, JobMismatchError)


class ElasticJob(ElasticValues):
    """Makes runs that survive the loss of workers.

    Args:
        devices: The devices of this worker, which its replicas share.
        make_ops: Returns what reduces between the devices of replicas.

    Attributes:
        generation: Which workers there are: it changes with them.
        departures: Which of them are about to leave.
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
        self._postponed = extended.mirrors.postponed = Postponed()
        self.variables = KeptVariables()
        extended.mirrors.shared.transact = self.transact
        self._inputs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._num_commits = 0
        # What came with the last commit, by rank.
        self._rows: list[Tensor] = []
        self._is_busy = False
        # What those who join get to know. None of them is let in before it is set.
        self._admission: Checkpoint | None = None
        # What they get: the state before the run that comes next, until that is complete.
        self._boundary: Any = None
        # Whether somebody has asked one of the workers to be let in.
        self._is_asked = False
        self.departures = Departures()
        # On a worker that has joined: what it got, and whether it has not trained with it yet.
        self._arrival: dict[str, Any] | None = None
        self.is_arriving = bool(members.met.stateless)
        # The same of communication hooks.
        self.of_hooks: Contents | None = None
        # By the code of a step, whether it adds to the gradients that earlier runs left.
        self._adds: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def close(self) -> None:
        """Leaves the other workers."""
        forget_elastic(self)
        self.members.leave()

    def begin(self) -> None:
        """When the strategy is made. A worker that joins gets what the others have."""
        jobs.add(self)
        if self.is_arriving:
            start, met = time.monotonic(), self.members.met
            while self._arrival is None:
                try:
                    told = share_state(met.communicator, None, met.source)
                    self.departures.numbers = set(told["leaving"])
                    if told["has_hooks"]:
                        self.of_hooks = exchanged(met.communicator, met.members, None)
                    self._arrival = told["state"]
                except CommunicationError as error:
                    met = self.members.meet_again(None, error)
            (self._num_commits,) = met.position
            self._extended.mirrors.shared.is_silent = True
            if met.generation != self.generation:
                self._move(met, start, is_undone=False)

    def admit(self, admission: Checkpoint) -> None:
        """Lets workers join from now on; on one that has joined, takes over what it got."""
        for one in self._inputs:
            if admission.holds(one):
                one.check_known()
        self._admission = admission
        if self._arrival is not None:
            admission.take(self._arrival["state"])
            self._snapshot.take_gradients(self._arrival["gradients"])
            self.variables.take(self._arrival["variables"])
            self._arrival = None

    def let_go(self) -> bool:
        """Between two steps: preempted workers leave, and the others go on.

        Returns:
            Whether nobody left, because too few workers would go on. Then all of them are to end.
        """
        while leaving := self.departures.ranks(self._numbers):
            if len(self._numbers) - len(leaving) < self.members.min_workers:
                return True
            if not self._all_know():
                continue
            if self.members.met.rank in leaving:
                _log.warning("Leaving: preempted. The other workers take over and go on.")
                self.close()
                self.departures.leave()
            start = time.monotonic()
            met, _ = self._meet(None, leaving=leaving)
            self._move(met, start, is_undone=False)
        return False

    def at_boundary(self, given: Any) -> None:
        """Before the next batch of an input is taken: lets workers leave and join."""
        if self.is_arriving:
            self._arrive()
        self.let_go()
        if not self._is_asked or self._admission is None or not self._admission.holds(given):
            return
        if any(one.is_read_apart for one in self._inputs):
            # A new worker would not know how far the others are.
            return
        self._is_asked = False
        start = time.monotonic()
        state = {
            "state": self._admission.state_of(),
            "gradients": self._snapshot.gradients(),
            "variables": self.variables.state(),
        }
        # If a worker is lost meanwhile, those who join may need it when others run already.
        self._boundary = map_leaves(in_host_memory, state)
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
        lost = lost_arguments(arguments)
        code = getattr(fn, "__code__", None)
        gradients = self._extended.gradients
        had_unreduced = gradients.has_unreduced
        keeps = self._adds.get(code, True) if code is not None else True
        trained = self._extended.mirrors.all_leaves
        had_gradients = keeps and any(one.primary.grad is not None for one in trained)
        self._snapshot.begin(keep_gradients=keeps)
        self.variables.begin()
        results: list[Any] = []
        leaves: list[PerReplica] = []
        postponed, hooks = self._postponed, self._extended.replica_hooks

        def work() -> Tensor:
            args, kwargs = self._relaid(arguments, rebuild) or given
            postponed.is_on = True
            results[:] = [self._extended._run_step(fn, args, kwargs)]
            if hooks is not None:
                hooks.tell(self._numbers)
            leaves[:] = distributed(results[0])
            postponed.look_at([leaf.values for leaf in leaves])
            variables, is_asked = self.variables.told(), self.members.newcomers()
            return packed(leaves, variables, is_asked=is_asked, sign=self.departures.sign())

        def complete() -> None:
            self._snapshot.end()
            postponed.make()
            if hooks is not None:
                hooks.commit()

        def undo() -> None:
            check_again(arguments, lost)
            if had_unreduced or (self._extended.gradients.has_added and not keeps):
                raise UnsupportedError(
                    "A worker was lost, and the run cannot be made again, because it adds to "
                    "gradients of earlier runs, which were not kept. Clear and "
                    "reduce gradients in the run that computes them, or go on from a checkpoint."
                )
            postponed.forget()
            self._snapshot.restore()
            self.variables.restore()
            self._extended._undo_drawing()

        is_complete = False
        try:
            with self.busy():
                generation, known = self._transact(work, undo, complete)
            is_complete = True
        finally:
            self._snapshot.end()
            postponed.forget()
            postponed.is_on = False
            self.variables.end(is_complete=is_complete)
            if hooks is not None and not is_complete:
                hooks.restore()
        if code is not None and (had_gradients or self._extended.gradients.has_added):
            # A step that has added once may do so again: it may clear gradients in some runs only.
            self._adds[code] = self._extended.gradients.has_added or self._adds.get(code, False)
        for leaf, of_all in zip(leaves, known or [None] * len(leaves), strict=True):
            leaf.note_origin(generation, of_all)
        if generation == self.generation:
            return results[0]
        return map_leaves(self._relaid_if_known, results[0])

    def transact(self, work: Callable[[], T], undo: Callable[[], None]) -> T:
        """Does what all workers do together, again if a worker is lost meanwhile.

        Args:
            work: What they do. Within a run, it is a part of the run.
        """
        if self._is_busy:
            return work()
        results: list[T] = []

        def work_once() -> Tensor:
            results[:] = [work()]
            return packed(())

        self._extended.mirrors.shared.note()
        with self.busy():
            self._transact(work_once, undo)
        return results[0]

    def _transact(
        self,
        work: Callable[[], Tensor],
        undo: Callable[[], None],
        complete: Callable[[], None] = lambda: None,
    ) -> tuple[int, list[tuple[Any, ...] | None]]:
        """Does the work, again if need be, and what it is complete with when all have done it.

        Returns:
            The generation in which the work was done, and what all told about it.
        """
        caller = ThreadState()
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
                told = self._told(rows)
                self._is_asked = self._is_asked or told.is_asked
                self.departures.note(told.signs, self._numbers)
                return generation, told.known
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
            taken = None if handed is None else self._told(handed)
            self._move(met, start, is_undone=taken is None)
            if taken is not None:
                return generation, taken.known

    def _told(self, rows: list[Tensor]) -> Told:
        """Reads what came with a commit. What replicas wrote for themselves is known then."""
        told = unpacked(rows)
        self.variables.settle(told.variables, self._extended.layout)
        return told

    def _meet(
        self,
        error: CommunicationError | None,
        *,
        leaving: Sequence[int] = (),
        admits: bool = False,
    ) -> tuple[Met, list[Tensor] | None]:
        """Survivors meet, and tell those who lack something.

        Returns:
            What they have agreed on. What all said with the last commit, if this worker has not
            passed it and another one has.
        """
        while True:
            if (before := self.members.met).members[before.rank] in self.departures.numbers:
                leaving = [before.rank]
            met = self.members.meet_again((self._num_commits,), error, leaving, admits=admits)
            is_behind = met.position != (self._num_commits,)
            hooks = self._extended.replica_hooks
            given: dict[str, Any] = {
                "rows": self._rows,
                "is_asked": self._is_asked,
                "leaving": sorted(self.departures.numbers),
                "state": self._boundary,
                "has_hooks": hooks is not None,
            }
            try:
                if len(set(met.positions)) > 1:
                    given = share_state(met.communicator, given, met.source)
                if hooks is not None:
                    hooks.meet(met.communicator, met.members, is_ahead=is_behind)
            except CommunicationError as again:
                error, leaving, admits = again, (), False
                continue
            self._is_asked = given["is_asked"]
            self.departures.numbers = set(given["leaving"])
            if not is_behind:
                return met, None
            (self._num_commits,), self._rows = met.position, given["rows"]
            return met, self._rows

    def _move(self, met: Met, start: float, *, is_undone: bool) -> None:
        """Takes the replicas that this worker has now."""
        extended = self._extended
        before, numbers = extended.layout, self._numbers
        counts = dealt(before.total, len(met.members))
        devices = spread(self._devices, counts[met.rank])
        extended._relayout(devices, self._make_ops(devices), met.communicator, counts)
        self.generation = met.generation
        for one in list(self._inputs):
            one._move(devices, extended.strategy._input_context)
        _log.warning(
            "%s %s It took %.1f s.",
            account(before, numbers, extended.layout, met, self.departures.numbers),
            "The last run was undone, and is made again." if is_undone else "No run was undone.",
            time.monotonic() - start,
        )
        self._numbers = met.members
