"""`StrategyExtended`: the methods of `tf.distribute` for authors of training loops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from unisono.arguments import (
    check_bool,
    check_call,
    check_instance,
    check_int,
    check_iterable,
    in_words,
)
from unisono.contexts import CrossReplicaContext, current_replica, entered, get_strategy
from unisono.devices import Device, cpu_slots
from unisono.errors import ContextError, UnsupportedError
from unisono.input import ArrayDataset, DistributedIterator, numpy_dataset
from unisono.modules import AnyVariable, is_variable, variable_of
from unisono.options import CommunicationOptions, ReduceOp
from unisono.reductions import destinations_of, listed_pairs
from unisono.strategies.combining import concatenate
from unisono.strategies.worker import WorkerReplicas
from unisono.values import DistributedValues, Mirrored, flatten, select_replica

if TYPE_CHECKING:
    from unisono.strategies.steps import MultiStepContext
    from unisono.variables import Variable


class StrategyExtended(WorkerReplicas):
    """Further methods of a strategy of one worker.

    Args:
        devices: The device of each replica.
        cross_device_ops: What reduces between them.
        reduce_gradients: How the gradients of the replicas become one.
        options: Hints for all reductions.
        is_serial: Whether replicas run one after another.
        synchronize_batch_norm: Whether batch normalization is over the batches of all replicas.
        workers: All workers, which this one is connected to; None if it is alone.
        threads_per_replica: How many threads torch may use inside an operator on each replica. None
            means that the replicas of a worker share its threads.
        tuning: What the links were measured to cost, the same on all workers; None if they were
            not.
    """

    experimental_require_static_shapes = False
    experimental_between_graph = False
    experimental_should_init = True
    should_checkpoint = True
    should_save_summary = True

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        """The devices that variables are kept on."""
        return self._devices

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls `fn(*args, **kwargs)` on every replica; see `Strategy.run`.

        If `args` is one distributed value or tensor, as an iterator gives, each replica unpacks
        its own component, as TensorFlow does: a tensor, along its first dimension.
        """
        self.strategy._check_cross_replica("call_for_each_replica()")
        is_unpacked = isinstance(args, (DistributedValues, Tensor))
        check_call("fn", fn, () if is_unpacked else args, kwargs)
        if is_unpacked:
            fn, args = functools.partial(_unpack, fn), (args,)
        return self._call(fn, args, kwargs or {})

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduces a value, or every distributed value of a nested structure, to devices.

        See `CrossDeviceOps.reduce`; `reduce_op` may be a name. Values that know the samples of
        their replicas are reduced as `Strategy.reduce` says. A mirrored `value` is its own mean,
        and has no sum: that is an `UnsupportedError`.
        """
        self.strategy._check_cross_replica("reduce_to()")
        op = ReduceOp.read(reduce_op)
        if not isinstance(value, DistributedValues):
            leaves, rebuild = flatten(value)
            if any(isinstance(leaf, DistributedValues) for leaf in leaves):
                return rebuild([self.reduce_to(op, leaf, destinations, options) for leaf in leaves])
            if self.counting.is_wrapped:
                return self._reduce_single(op, value, destinations)
        if isinstance(value, Mirrored) or (is_variable(value) and value.is_mirrored):
            if op is ReduceOp.SUM and self.num_replicas_in_sync > 1:
                raise UnsupportedError(
                    "A mirrored value is the same on every replica, so its sum over replicas has "
                    "no meaning. Use MEAN, or multiply it by the number of replicas."
                )
            return self.broadcast_to(value, destinations)
        return self._reduce(op, value, destinations, options)

    def _reduce(
        self, op: ReduceOp, value: Any, destinations: Any, options: CommunicationOptions | None
    ) -> Any:
        value = self.counting.counted(op, value)
        return self.cross_device_ops.reduce(op, value, destinations, self.options.merge(options))

    def _reduce_single(self, op: ReduceOp, value: Any, destinations: Any) -> Any:
        """Reduces what is not distributed: the same on every replica."""
        is_zero = isinstance(value, (int, float)) and value == 0
        if op is ReduceOp.SUM and not is_zero:
            raise UnsupportedError(
                f"{in_words(value)} is a single value, not one value per replica, so its sum over "
                f"{self.num_replicas_in_sync} replicas has no meaning. Reduce what `run` returns."
            )
        return self.broadcast_to(value, destinations)

    def _gather(self, value: Any, axis: int) -> Any:
        return concatenate(self, value, axis)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduces many values to devices; see `CrossDeviceOps.batch_reduce`."""
        self.strategy._check_cross_replica("batch_reduce_to()")
        op = ReduceOp.read(reduce_op)
        listed = listed_pairs(value_destination_pairs)
        pairs = [(self.counting.counted(op, value), where) for value, where in listed]
        return list(self.cross_device_ops.batch_reduce(op, pairs, self.options.merge(options)))

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copies a tensor to devices; see `CrossDeviceOps.broadcast`."""
        self.strategy._check_cross_replica("broadcast_to()")
        return self.cross_device_ops.broadcast(tensor, destinations_of(destinations))

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,  # noqa: FBT001, FBT002 - the signature of tf.distribute
    ) -> Any:
        """Calls `fn(component, *args, **kwargs)` once for each storage of a variable.

        On a replica this is a `merge_call`.

        Args:
            var: A variable of this strategy.
            fn: Changes the component, in place. It is a tensor that also has the methods of a
                variable: `assign`, `assign_add`, `assign_sub` and `scatter_*`.
            args: Its further arguments. Of distributed ones it gets the component of the replica.
            kwargs: Its keyword arguments, treated as `args` are.
            group: Whether the results become one `Mirrored`.

        Returns:
            A `Mirrored` of what `fn` returns, or with `group=False` a tuple of it, one entry a
            storage: replicas that share a memory share one.

        Raises:
            UnsupportedError: If `var` is no `Variable`.
            ContextError: If it was made under another strategy.
        """
        check_call("fn", fn, args, kwargs)
        check_bool("group", group)
        if not is_variable(var):
            raise UnsupportedError(
                f"`update()` takes a `Variable` of the strategy, got {type(var).__name__}."
            )
        if not self.variable_created_in_scope(var):
            raise ContextError(
                f"`update()` of {self.strategy!r} was given a variable that was made under "
                f"{var.strategy!r}. Call that strategy's `extended.update()`."
            )
        context = current_replica()
        if context is not None:
            return context.merge_call(
                lambda _, *a, **k: self._update(var, fn, a, k, is_grouped=group), args, kwargs
            )
        return self._update(var, fn, args, kwargs or {}, is_grouped=group)

    def _update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        is_grouped: bool,
    ) -> Any:
        components = zip(var.owners, var.components(), strict=True)
        calls = [(owner, functools.partial(fn, component)) for owner, component in components]
        results = self._call_each(calls, args, kwargs)
        if is_grouped and all(leaf is None for own in results for leaf in flatten(own)[0]):
            return None
        return _grouped(
            results, [var.devices[owner] for owner in var.owners], is_grouped=is_grouped
        )

    def _call_each(
        self,
        calls: Sequence[tuple[int, Callable[..., Any]]],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> tuple[Any, ...]:
        """Makes a call for each of some replicas, with its own arguments."""
        results = []
        for replica_id, call in calls:
            own_args, own_kwargs = select_replica(replica_id, (tuple(args), kwargs))
            with entered(CrossReplicaContext(self, replica_id)):
                results.append(call(*own_args, **own_kwargs))
        return tuple(results)

    def update_non_slot(
        self,
        colocate_with: Sequence[Device],
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,  # noqa: FBT001, FBT002 - the signature of tf.distribute
    ) -> Any:
        """Calls `fn(*args, **kwargs)` once for each of the devices, with their own arguments.

        Args:
            colocate_with: The devices, as `non_slot_devices` returns them.
            fn: What to call.
            args: Its arguments. Of distributed ones it gets the component of the replica.
            kwargs: Its keyword arguments, treated as `args` are.
            group: Whether the results become one `Mirrored`; otherwise they are a tuple.

        Raises:
            UnsupportedError: If a device is none of this strategy's.
        """
        self.strategy._check_cross_replica("update_non_slot()")
        check_call("fn", fn, args, kwargs)
        check_bool("group", group)
        devices = tuple(check_iterable("colocate_with", colocate_with))
        for device in devices:
            if not isinstance(device, Device) or device not in self.worker_devices:
                raise UnsupportedError(
                    f"`update_non_slot()` takes devices of {self.strategy!r}, got "
                    f"{in_words(device)}. Pass those that `non_slot_devices()` returns."
                )
        calls = [(self.worker_devices.index(device), fn) for device in devices]
        return _grouped(self._call_each(calls, args, kwargs or {}), devices, is_grouped=group)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> tuple[Device, ...]:
        """Returns the devices of all variables of `var_list`; those of none are `cpu:0`."""
        variables = check_iterable("var_list", var_list)
        for var in variables:
            check_instance("var_list", var, DistributedValues, "a list of variables")
        return tuple(dict.fromkeys(d for var in variables for d in var.devices)) or cpu_slots(1)

    def read_var(self, v: Variable) -> Any:
        """Reads the variable `v`; one that is `ON_READ`, as its aggregation says."""
        check_instance("v", v, AnyVariable, "a `Variable` of the strategy")
        return v.value()

    def value_container(self, value: Any) -> Any:
        """Returns what `value` is a replica's part of: a variable, or a model's parameter.

        Everything else is its own container.
        """
        variable, owner = variable_of(value), self.mirrors.owners.get(id(value))
        if variable is None:
            return value if owner is None else owner.primary
        return variable

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether `v` is a variable that was made under this strategy."""
        return is_variable(v) and v.strategy is self.strategy

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Variable) -> Iterator[None]:
        """Within the block, variables are made on the devices of `colocate_with_variable`.

        All variables of a strategy are on all its devices, so this only checks whose it is.

        Raises:
            ContextError: If it is entered outside the scope of this strategy.
            UnsupportedError: If the variable was not made under this strategy.
        """
        if get_strategy() is not self.strategy:
            raise ContextError(
                f"`colocate_vars_with()` of {self.strategy!r} was called outside its scope. Enter "
                "`strategy.scope()` first."
            )
        if not self.variable_created_in_scope(colocate_with_variable):
            raise UnsupportedError(
                f"`colocate_vars_with()` takes a variable of {self.strategy!r}, got "
                f"{in_words(colocate_with_variable)}."
            )
        yield

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[..., Any],
        iterator: DistributedIterator,
        iterations: int = 1,
        initial_loop_values: Mapping[str, Any] | None = None,
    ) -> MultiStepContext:
        """Calls `fn(context, inputs)` with one element of the input after another.

        `fn` runs in cross-replica context, where it calls `run`, and gives what it has for the
        caller to `context`.

        Args:
            fn: One step.
            iterator: Where the elements come from.
            iterations: How many steps there are.
            initial_loop_values: What `last_step_outputs` are if there is no step.

        Returns:
            The context, with what the last step gave.

        Raises:
            UnsupportedError: If `iterations` is negative.
        """
        self.strategy._check_cross_replica("experimental_run_steps_on_iterator()")
        check_call("fn", fn, (), None)
        check_int("iterations", iterations, least=0)
        check_instance("iterator", iterator, DistributedIterator, "a distributed iterator")
        from unisono.strategies.steps import MultiStepContext

        steps = MultiStepContext(initial_loop_values)
        with entered(CrossReplicaContext(self.strategy.extended)):
            for _ in range(iterations):
                fn(steps, iterator.get_next())
        return steps

    def experimental_make_numpy_dataset(
        self, numpy_input: Any, session: object = None
    ) -> ArrayDataset:
        """See `Strategy.experimental_make_numpy_dataset`."""
        return numpy_dataset(numpy_input)

    def __deepcopy__(self, memo: dict[int, Any]) -> StrategyExtended:
        return StrategyExtended(
            self.worker_devices,
            self._given_ops,
            reduce_gradients=self.reduce_gradients,
            options=self.options,
            is_serial=self._is_serial,
            synchronize_batch_norm=self.mirrors.synchronizes,
            threads_per_replica=self.threads_per_replica,
            tuning=self._tuning,
        )


def _grouped(results: tuple[Any, ...], devices: Sequence[Device], *, is_grouped: bool) -> Any:
    if not is_grouped:
        return results
    return results[0] if len(results) == 1 else Mirrored.placed(results, tuple(devices))


def _unpack(fn: Callable[..., Any], own: Any, **kwargs: Any) -> Any:
    return fn(*check_iterable("args", own), **kwargs)
