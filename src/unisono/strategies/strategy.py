"""`Strategy`: what a training program sees of its replicas."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from torch import nn

from unisono.arguments import check_call, check_instance, check_int, check_optional, in_words
from unisono.contexts import CrossReplicaContext, current_replica, entered, other_strategy
from unisono.errors import ContextError, UnsupportedError
from unisono.modules import bring_in, creating
from unisono.options import ReduceOp, VariableAggregation
from unisono.strategies.combining import read_axes, reduce_leaf
from unisono.strategies.extended import StrategyExtended
from unisono.strategies.input_methods import InputMethods
from unisono.values import DistributedValues, flatten, select_replica

if TYPE_CHECKING:
    from unisono.cluster import ClusterResolver
    from unisono.hooks import WorkersGroup
    from unisono.hooks.hook import HookFunction

T = TypeVar("T")


class RunOptions(NamedTuple):
    """Options of a run on TPUs. CPUs and GPUs ignore them, as in TensorFlow.

    Attributes:
        experimental_enable_dynamic_batch_size: Whether shapes of the input may differ from run to
            run, which they always may here.
        experimental_bucketizing_dynamic_shape: Whether TPUs pad such shapes.
        experimental_xla_options: Options of TPUs' compiler.
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: object = None


class Strategy(InputMethods):
    """Trains on several replicas as if they were one.

    A program makes one of its subclasses, such as `MirroredStrategy`.

    Args:
        extended: What does the work; made by the subclass.
    """

    def __init__(self, extended: StrategyExtended) -> None:
        check_instance("extended", extended, StrategyExtended, "a `StrategyExtended`")
        self._extended = extended
        extended.bind(self)

    @property
    def extended(self) -> StrategyExtended:
        """Further methods, for authors of training loops or strategies."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over which gradients are aggregated."""
        return self._extended.num_replicas_in_sync

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The cluster this strategy runs in; None for a strategy of one worker."""
        return None

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the one that writes checkpoints and summaries.

        A strategy of one worker always is.
        """
        return self._extended.should_checkpoint

    def check_health(self) -> None:
        """Raises a `CommunicationError` if another worker is lost; the others need not call it.

        A strategy of one worker has no other to lose.
        """
        self._extended.workers.check_health()

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Makes this the current strategy; models and optimizers made within belong to it.

        It may be entered again while it is open, but not another strategy's.
        """
        self._check_cross_replica("scope()")
        with entered(CrossReplicaContext(self._extended)), creating(self._extended.mirrors):
            yield self

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls `fn` on every replica at the same time.

        An exception on one replica ends the call on all of them and is raised here; the strategy
        can be used again.

        Args:
            fn: What to call.
            args: Its arguments. Distributed values in them, also inside lists, tuples and dicts,
                are replaced by the replica's own components.
            kwargs: Its keyword arguments, with the same replacement.
            options: Options of a run on TPUs; CPUs and GPUs ignore them.

        Returns:
            What the replicas return, merged into one structure of `PerReplica` values. What is the
            same object on all of them, and everything where there is one replica, comes as it is.

        Raises:
            UnsupportedError: If `fn` cannot be called, `args` is no list or tuple, `kwargs` no
                dict, or `options` no `RunOptions`.
            ContextError: If it is called on a replica, or under another strategy.
        """
        check_call("fn", fn, args, kwargs)
        check_optional("options", options, RunOptions, "`unisono.RunOptions`")
        self._check_cross_replica("run()")
        return self._extended._call(fn, args, kwargs or {})

    def reduce(
        self,
        reduce_op: ReduceOp | VariableAggregation | str,
        value: Any,
        axis: int | Sequence[int] | Any = None,
    ) -> Any:
        """Reduces a value over the replicas, to one tensor.

        What `run` returned for an uneven batch knows how many samples each replica had. A mean of
        it is weighted by them: the mean of losses that are means over the samples of a replica is
        the mean over all samples. A replica without samples is left out of every reduction. Other
        values count alike, also bare Python numbers that the only replica of a worker returned.

        Args:
            reduce_op: How; a `ReduceOp` or its name.
            value: A `PerReplica` value, or a nested structure of them. None stays None.
            axis: Also reduce over these dimensions of each component. A mean is then over all
                elements of all replicas, which is right for uneven and empty batches. If
                `reduce_op` is a `VariableAggregation`, this is the form of TensorFlow 1.12: the
                devices to reduce to, None for those of the value, and the result is a `Mirrored`.

        Returns:
            The structure of `value` with tensors, on the first replica's device.
        """
        self._check_cross_replica("reduce()")
        if isinstance(reduce_op, VariableAggregation):
            return _older_names().reduced(self, reduce_op, value, axis)
        op = ReduceOp.read(reduce_op)
        leaves, rebuild = flatten(value)
        axes = read_axes(axis)
        return rebuild([reduce_leaf(self._extended, op, leaf, axes) for leaf in leaves])

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the components of a value along `axis`, in replica order.

        On many workers all of them call it, and all get the components of all replicas. What a
        replica without samples has returned is left out.

        Args:
            value: A `PerReplica` of dense tensors, whose lengths along `axis` may differ.
            axis: The dimension along which they are put together.

        Returns:
            One tensor, on the first replica's device.

        Raises:
            ReplicaMismatchError: If the components differ in dtype, or in shape but for `axis`, or
                are not one per replica.
            UnsupportedError: If they are sparse or nested, or have no dimension `axis`.
        """
        self._check_cross_replica("gather()", "Call `all_gather` of the replica context there.")
        check_int("axis", axis)
        return self._extended._gather(value, axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the components of `value` of this worker, always as a tuple.

        What a replica without samples has returned is left out, so that sums and lists of these
        results hold every sample once.

        Args:
            value: A distributed value, or a nested structure of them; anything else is the one
                entry of the tuple.
        """
        leaves, _ = flatten(value)
        are_counted = self._extended.counting.are_counted(*leaves)
        if isinstance(value, DistributedValues):
            has_all = all(are_counted)
            return value.values if has_all else tuple(itertools.compress(value.values, are_counted))
        if not any(isinstance(leaf, DistributedValues) for leaf in leaves):
            return (value,) if any(are_counted) else ()
        local_ids = range(len(self._extended.worker_devices))
        return tuple(select_replica(i, value) for i in itertools.compress(local_ids, are_counted))

    unwrap = experimental_local_results

    def mirror(self, target: T) -> T:
        """Makes an object that was created elsewhere belong to the strategy.

        Args:
            target: A model, optimizer, scheduler or `GradScaler`.

        Returns:
            The same object, which now belongs to the strategy as if it had been made in its scope.

        Raises:
            UnsupportedError: If it is something else.
        """
        self._check_cross_replica("mirror()")
        is_stepped = callable(getattr(target, "step", None))
        if isinstance(target, type) or not (isinstance(target, nn.Module) or is_stepped):
            raise UnsupportedError(
                "`mirror()` takes a model, optimizer, scheduler or `GradScaler`, got "
                f"{in_words(target)} of type {type(target).__name__}. Call it once for each object "
                "in a container."
            )
        bring_in(target, self._extended.mirrors)
        return target

    @property
    def process_group(self) -> WorkersGroup:
        """The workers as a process group of torch, for communication hooks.

        In a hook that is called for each replica, its ranks are the replicas of all workers.
        """
        return self._extended.process_group

    def register_comm_hook(self, state: object, hook: HookFunction) -> None:
        """Lets `hook` reduce gradients between workers, as it does for DDP.

        It is called once on every worker for each pack of gradients that are dense, in one order
        and while the backward pass runs. The bucket that it is given holds the mean over the
        replicas of this worker; what it returns becomes the gradient. It must be registered before
        anything is made in the scope, by all workers, and only once.

        With `num_replicas`, it is called for each replica instead: the bucket holds the gradients
        of the replica, the ranks of `process_group` are the replicas of all workers, and each
        replica has its own copy of `state` and of `hook`. So the bits do not depend on the layout.

        Args:
            state: What the hook is given first. None stands for `process_group`.
            hook: Called as `hook(state, bucket)` with a `GradBucket`. It returns the mean over all
                ranks as a flat tensor, or a future of it. torch's own hooks fit, and those of
                `unisono.hooks`.

        Raises:
            UnsupportedError: If the hook keeps something that cannot be copied for each replica.
        """
        self._check_cross_replica("register_comm_hook()")
        self._extended.register_comm_hook(state, hook)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """On a replica: backward passes in the block accumulate gradients without reducing them.

        The next backward pass outside the block reduces all that has been added up.

        Raises:
            ContextError: If it is not entered on a replica of this strategy.
        """
        context = current_replica()
        if context is None or context.strategy is not self:
            raise ContextError(
                "`no_sync()` was entered outside `run`. Enter it in the function that you pass to "
                "`run`."
            )
        notes = context.notes
        before, notes.is_without_sync = notes.is_without_sync, True
        try:
            yield
        finally:
            notes.is_without_sync = before

    def experimental_initialize(self) -> list[Any]:
        """Does nothing, and returns an empty list."""
        return []

    def experimental_finalize(self) -> list[Any]:
        """Calls `close`, and returns an empty list."""
        self.close()
        return []

    def configure(
        self,
        session_config: object = None,
        cluster_spec: object = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Refuses a cluster, which this strategy of one host has no use for.

        Args:
            session_config: Taken and left as it is: there is no session.
            cluster_spec: Must be None.
            task_type: Must be None.
            task_id: Must be None.

        Raises:
            UnsupportedError: If a cluster or a task is given.
        """
        if cluster_spec is not None or task_type is not None or task_id is not None:
            raise UnsupportedError(
                f"{type(self).__name__} runs in one process, got "
                f"`cluster_spec={in_words(cluster_spec)}`, `task_type={in_words(task_type)}`, "
                f"`task_id={in_words(task_id)}`. Use `MultiWorkerMirroredStrategy` for a cluster."
            )

    def update_config_proto(self, config_proto: T) -> T:
        """Returns a copy of `config_proto`, changed for this strategy: on one host, not at all.

        Raises:
            UnsupportedError: If it cannot be copied.
        """
        try:
            return copy.deepcopy(config_proto)
        except Exception as error:
            raise UnsupportedError(
                f"`config_proto` cannot be copied: {type(error).__name__}: {error}"
            ) from error

    def close(self) -> None:
        """Ends the threads of the replicas; they start again with the next `run`.

        A strategy of many workers also leaves the others, which cannot be taken back.
        """
        self._extended.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The names that TensorFlow 1.12 had for the methods of a strategy."""
            if name.startswith("_"):
                return super().__getattribute__(name)
            return _older_names().older_name(self, name)

    def __copy__(self) -> Strategy:
        raise ContextError("A strategy cannot be copied shallowly; use `copy.deepcopy`.")

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "A strategy cannot be pickled, so it cannot be saved or sent to another process. Save "
            "the `state_dict()` of the model and of the optimizer, and make a new strategy."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        if self._extended.hook is not None:
            raise UnsupportedError(
                "A strategy with a communication hook cannot be copied, because both would write "
                "to the hook's state. Make a new strategy, and register a new hook."
            )
        duplicate = object.__new__(type(self))
        memo[id(self)] = duplicate
        Strategy.__init__(duplicate, copy.deepcopy(self._extended, memo))
        return duplicate

    def _check_cross_replica(self, what: str, remedy: str = "") -> None:
        self._extended.check_process()
        other = other_strategy(self)
        if other is not None:
            raise ContextError(
                f"`{what}` of {self!r} was called under another strategy, {other!r}. Leave its "
                "scope first."
            )
        if current_replica() is not None:
            raise ContextError(
                f"`{what}` was called on a replica, inside `run`. "
                + (remedy or "Call it outside `run`, or in a `merge_call`.")
            )

    def __repr__(self) -> str:
        devices = ", ".join(map(str, self._extended.worker_devices))
        return f"{type(self).__name__}({devices})"


def _older_names() -> ModuleType:
    """Returns what knows the names that strategies had in TensorFlow 1.12."""
    from unisono.contrib import older_names

    return older_names
