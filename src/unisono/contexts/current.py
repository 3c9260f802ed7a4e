"""Where the running code is, and what code on a replica can ask for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from unisono.arguments import check_call, check_int
from unisono.contexts.collectives import Reduction, gather_tensors
from unisono.devices import Device
from unisono.errors import ContextError
from unisono.options import CommunicationOptions, ReduceOp, check_options
from unisono.reductions import CrossDeviceOps, ReplicaLayout, Workers
from unisono.values import as_tensor, flatten, set_replica_seen

if TYPE_CHECKING:
    from unisono.engines import ReplicaMeeting
    from unisono.gradients import GradientReducer
    from unisono.gradients.passes import OwnPass
    from unisono.modules import Leaves, Mirrors
    from unisono.strategies import Strategy
    from unisono.strategies.counting import Counting

Context: TypeAlias = "ReplicaContext | CrossReplicaContext"


class _Stack(threading.local):
    """The contexts that the current thread has entered."""

    def __init__(self) -> None:
        self.entered: list[Context] = []


stack = _Stack()
# Outside every scope code counts as the one replica of the default strategy, which adds itself.
_outside: list[ReplicaContext] = []


def set_outside(context: ReplicaContext) -> None:
    """Says what context code is in that has entered none."""
    _outside[:] = [context]


def is_default(strategy: Any) -> bool:
    """Whether `strategy` is that of code that has entered no other."""
    return strategy is _outside[0].strategy


def current_context() -> Context:
    """Returns the innermost context of this thread."""
    entered = stack.entered
    return entered[-1] if entered else _outside[0]


class entered:
    """Puts the running code into `context` until the block ends.

    A class and not a generator: a replica may be stopped at any instruction, and a generator that
    was not left properly would be ended later, by another thread.
    """

    __slots__ = ("_context", "_depth")

    def __init__(self, context: Context) -> None:
        self._context = context
        self._depth = 0

    def __enter__(self) -> None:
        self._depth = len(stack.entered)
        stack.entered.append(self._context)

    def __exit__(self, *error: object) -> None:
        del stack.entered[self._depth :]


class Replicas(Protocol):
    """What contexts, variables and gradients use of the strategy that runs them.

    `StrategyExtended` implements it.
    """

    workers: Workers
    layout: ReplicaLayout
    cross_device_ops: CrossDeviceOps
    mirrors: Mirrors
    gradients: GradientReducer
    current_weights: list[float]
    # What makes runs that survive the loss of workers, if something does.
    elastic: Any

    @property
    def counting(self) -> Counting:
        """How many samples each replica has."""

    @property
    def strategy(self) -> Strategy:
        """The strategy, for programs and messages."""

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        """The devices of the replicas."""

    @property
    def first_replica_id(self) -> int:
        """The number of the first replica among those of all workers."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas on all workers."""

    def adopt(self, leaves: Leaves) -> None:
        """Trains what belongs to no module, from now on."""

    def merge_call(
        self,
        context: ReplicaContext,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Does the work of `ReplicaContext.merge_call`."""

    def reduce_to(self, reduce_op: ReduceOp | str, value: Any, destinations: Any) -> Any:
        """Reduces a value over the replicas of all workers, to devices."""


@dataclass(frozen=True)
class CrossReplicaContext:
    """The code runs once, for all replicas of `strategy`."""

    replicas: Replicas = field(repr=False)
    replica_id: int | None = None
    generators: Any = field(default=None, repr=False)
    # Whether `uo.once` runs it, after which replicas get what it has written to the program.
    is_once: bool = False

    @property
    def strategy(self) -> Strategy:
        """The strategy that the replicas belong to."""
        return self.replicas.strategy


@dataclass(eq=False)
class ReplicaNotes:
    """What the engine remembers of a replica while it runs."""

    current_pass: OwnPass | None = None
    num_passes: int = 0
    is_without_sync: bool = False
    num_batch_norms: int = 0


@dataclass(frozen=True, eq=False)
class ReplicaContext:
    """The context of code that runs on one replica.

    Attributes:
        replicas: The replicas of this worker.
        local_id: The number of the replica on its worker, from 0.
        meeting: Where the replicas meet.
        gradient_weight: What this replica's gradients count for, in a mean over all replicas.
        notes: What the engine remembers of this replica in this run.
        generators: What the replica draws random numbers from; None if that is torch's own.
    """

    replicas: Replicas = field(repr=False)
    local_id: int
    meeting: ReplicaMeeting
    gradient_weight: float = 1.0
    notes: ReplicaNotes = field(default_factory=ReplicaNotes, repr=False)
    generators: Any = field(default=None, repr=False)

    @property
    def strategy(self) -> Strategy:
        """The strategy that the replica belongs to."""
        return self.replicas.strategy

    @property
    def weight(self) -> float:
        """What this replica's values count for in `all_reduce("MEAN", value * weight)`.

        It is 1 unless batches are uneven, and 0 if the replica has no samples. With
        `reduce_gradients="SUM"` it is 1 or 0.
        """
        return self.gradient_weight * self.replicas.counting.share

    @property
    def counts(self) -> bool:
        """Whether this replica has samples, so that its results count.

        It does unless a batch has fewer samples than there are replicas and this one got none. It
        then runs with a copy of a sample, and whatever it computes is left out: gradients, values
        that are reduced or gathered, and what it writes to variables and modules.
        """
        return self.gradient_weight != 0.0

    @property
    def replica_id_in_sync_group(self) -> int:
        """The number of the replica among those of all workers, from 0."""
        return self.replicas.first_replica_id + self.local_id

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that are kept in sync, on all workers."""
        return self.replicas.num_replicas_in_sync

    @property
    def num_local_replicas(self) -> int:
        """The number of replicas on this worker."""
        return len(self.replicas.mirrors.places)

    @property
    def device(self) -> Device:
        """The device of this replica."""
        return self.replicas.worker_devices[self.local_id]

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of this replica, as a tuple of one."""
        return (self.device,)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Waits until every replica makes a `merge_call`, then calls `merge_fn` once.

        Args:
            merge_fn: Called as `merge_fn(strategy, *args, **kwargs)` in cross-replica context, with
                the arguments of all replicas as `PerReplica` values. That of replica 0 is called.
            args: Its arguments, of this replica.
            kwargs: Its keyword arguments, of this replica.

        Returns:
            This replica's components of what `merge_fn` returns.

        Raises:
            UnequalCallsError: If another replica makes another call, or has returned.
        """
        self._check_current("merge_call()")
        check_call("merge_fn", merge_fn, args, kwargs)
        return self.replicas.merge_call(self, merge_fn, tuple(args), dict(kwargs or {}))

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Reduces every tensor of `value` over all replicas; every replica gets the result.

        A replica without samples gives nothing, see `counts`; a mean is over the others. Gradients
        flow through sums and means: they are reduced in the same way on their way back. All
        replicas must call it; see `merge_call`.

        Args:
            reduce_op: How; a `ReduceOp` or its name.
            value: A tensor, or a nested structure of them, the same on all replicas.
            options: Hints for this reduction.

        Returns:
            The structure of `value`, with the results.
        """
        self._check_current("all_reduce()")
        op = ReduceOp.read(reduce_op)
        check_options(options)
        leaves, rebuild = flatten(value)
        tensors = [as_tensor(leaf) for leaf in leaves]
        return rebuild(Reduction(self, op, options).of(tensors))

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenates every tensor of `value` over all replicas, along `axis`.

        A replica without samples gives nothing; see `counts`. Gradients flow through. All replicas
        must call it; see `merge_call`.

        Args:
            value: A tensor, or a nested structure of them, the same on all replicas. The tensors
                may differ in length along `axis`.
            axis: The dimension along which they are put together.
            options: Hints for this collective.

        Returns:
            The structure of `value`, with the results.

        Raises:
            UnsupportedError: If `axis` is no int, or a tensor is a scalar or sparse.
        """
        self._check_current("all_gather()")
        axis = check_int("axis", axis)
        check_options(options)
        leaves, rebuild = flatten(value)
        return rebuild([gather_tensors(self, as_tensor(leaf), axis, options) for leaf in leaves])

    def _check_current(self, what: str) -> None:
        if current_context() is not self:
            raise ContextError(
                f"`{what}` was called on a `ReplicaContext` that the running code is not on: it "
                "belongs to another replica, or to a `run` that has ended. Call "
                "`get_replica_context()` where you need the context, and do not store it."
            )


def current_replica() -> ReplicaContext | None:
    """Returns the replica of a strategy that this thread is running, if it is."""
    entered = stack.entered
    if entered and isinstance(entered[-1], ReplicaContext):
        return entered[-1]
    return None


def _replica_seen() -> int | None:
    entered = stack.entered
    if not entered:
        return None
    context = entered[-1]
    if isinstance(context, ReplicaContext):
        return context.local_id
    return context.replica_id


set_replica_seen(_replica_seen)


def get_replica_context() -> ReplicaContext | Any:
    """Returns the current replica's context, or None in a cross-replica context.

    Type checkers do not ask steps to compare it with None. Outside every scope it is the context
    of the default strategy, which has one replica.
    """
    context = current_context()
    return context if isinstance(context, ReplicaContext) else None


def in_cross_replica_context() -> bool:
    """Whether the code runs for all replicas: in a scope, or in a `merge_call`."""
    return isinstance(current_context(), CrossReplicaContext)


def get_strategy() -> Strategy:
    """Returns the strategy of the current context; outside every scope, the default one."""
    return current_context().strategy


def has_strategy() -> bool:
    """Whether the code runs under a strategy other than the default one."""
    return not is_default(current_context().strategy)


def running_replica() -> ReplicaContext | None:
    """Returns the replica that this thread runs, in whatever context it is now."""
    for context in reversed(stack.entered):
        if isinstance(context, ReplicaContext):
            return context
    return None


def runs_once() -> bool:
    """Whether this thread runs what a step gives to `uo.once`."""
    for context in reversed(stack.entered):
        if isinstance(context, ReplicaContext) or context.is_once:
            return isinstance(context, CrossReplicaContext)
    return False


def other_strategy(strategy: Any) -> Strategy | None:
    """Returns the strategy that this thread is under, if it is another than `strategy`."""
    entered = stack.entered
    if entered and entered[-1].strategy is not strategy:
        return entered[-1].strategy
    return None
