"""What an extension does with values and variables, under the names of `tf.distribute`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
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
from unisono.kernels import check_axes
from unisono.options import CommunicationOptions, ReduceOp
from unisono.reductions import CrossDeviceOps, ReplicaLayout, destinations_of, listed_pairs
from unisono.strategies.steps import MultiStepContext
from unisono.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    as_tensor,
    flatten,
    select_replica,
)
from unisono.variables import Component, Mirrors, Variable, variable_of

if TYPE_CHECKING:
    from unisono.strategies.counting import Counting
    from unisono.strategies.elastic_job import ElasticJob
    from unisono.strategies.strategy import Strategy


class ExtendedMethods:
    """The part of an extension that reduces values, updates variables and makes steps."""

    if TYPE_CHECKING:
        mirrors: Mirrors
        layout: ReplicaLayout
        cross_device_ops: CrossDeviceOps
        counting: Counting
        options: CommunicationOptions
        elastic: ElasticJob | None

        @property
        def strategy(self) -> Strategy:
            """See `StrategyExtended.strategy`."""

        @property
        def worker_devices(self) -> tuple[Device, ...]:
            """See `StrategyExtended.worker_devices`."""

        @property
        def num_replicas_in_sync(self) -> int:
            """See `StrategyExtended.num_replicas_in_sync`."""

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
            if self.layout.are_several or self.elastic is not None:
                return self._reduce_single(op, value, destinations)
        if isinstance(value, Mirrored) or (isinstance(value, Variable) and value.is_mirrored):
            if op is ReduceOp.SUM and self.num_replicas_in_sync > 1:
                raise UnsupportedError(
                    "A mirrored value is the same on every replica, so its sum over replicas has "
                    "no meaning. Use MEAN, or multiply it by the number of replicas."
                )
            return self.broadcast_to(value, destinations)
        if self.elastic is not None:
            reduce = functools.partial(self._reduce, op, value, destinations, options)
            return self.elastic.reduce(op, value, destinations, reduce)
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

    def _reduce_leaf(self, op: ReduceOp, value: Any, axes: tuple[int, ...] | None) -> Any:
        """Reduces one value over the replicas and the dimensions `axes`, to the first device."""
        host = self.worker_devices[0]
        if value is None:
            return None
        if axes is None:
            return self.reduce_to(op, value, host)
        num_local = len(self.worker_devices)
        parts = value.values if isinstance(value, DistributedValues) else (value,) * num_local
        tensors = [as_tensor(part) for part in parts]
        for tensor in tensors:
            check_axes(tensor, axes)
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise UnsupportedError(
                f"With an `axis`, the operation must be SUM or MEAN, got {op}. Reduce without an "
                "`axis` first."
            )

        def sum_of(tensors: Iterable[Tensor]) -> Any:
            summed = PerReplica.placed(tuple(tensors), self.worker_devices)
            return self.reduce_to(ReduceOp.SUM, summed, host)

        are_counted = self.counting.are_counted(value)
        sums = [tensor.sum(dim=axes) for tensor in tensors]
        total = sum_of(
            own if is_counted else torch.zeros_like(own)
            for own, is_counted in zip(sums, are_counted, strict=True)
        )
        if op is ReduceOp.SUM:
            return total
        num_elements = sum_of(
            torch.tensor(tensor.numel() // max(1, own.numel()) * is_counted)
            for tensor, own, is_counted in zip(tensors, sums, are_counted, strict=True)
        ).to(total.device)
        is_real = total.is_floating_point() or total.is_complex()
        return (total if is_real else total.double()) / num_elements

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
        if not isinstance(var, Variable):
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
        results = []
        if self.elastic is not None:
            self.elastic.variables.before_write(var, var.owners)
        for owner in var.owners:
            own_args, own_kwargs = select_replica(owner, (tuple(args), kwargs))
            with entered(CrossReplicaContext(self.strategy.extended, owner)):
                results.append(fn(Component.of(var.values[owner]), *own_args, **own_kwargs))
        if not is_grouped:
            return tuple(results)
        leaves = [flatten(result)[0] for result in results]
        if all(leaf is None for own in leaves for leaf in own):
            return None
        devices = tuple(var.devices[owner] for owner in var.owners)
        return results[0] if len(results) == 1 else Mirrored.placed(tuple(results), devices)

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
        results = []
        for device in devices:
            if not isinstance(device, Device) or device not in self.worker_devices:
                raise UnsupportedError(
                    f"`update_non_slot()` takes devices of {self.strategy!r}, got "
                    f"{in_words(device)}. Pass those that `non_slot_devices()` returns."
                )
            replica_id = self.worker_devices.index(device)
            own_args, own_kwargs = select_replica(replica_id, (tuple(args), kwargs or {}))
            with entered(CrossReplicaContext(self.strategy.extended, replica_id)):
                results.append(fn(*own_args, **own_kwargs))
        if not group or len(results) == 1:
            return tuple(results) if not group else results[0]
        return Mirrored.placed(tuple(results), devices)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> tuple[Device, ...]:
        """Returns the devices of all variables of `var_list`; those of none are `cpu:0`."""
        variables = check_iterable("var_list", var_list)
        for var in variables:
            check_instance("var_list", var, DistributedValues, "a list of variables")
        return tuple(dict.fromkeys(d for var in variables for d in var.devices)) or cpu_slots(1)

    def read_var(self, v: Variable) -> Any:
        """Reads the variable `v`; one that is `ON_READ`, as its aggregation says."""
        check_instance("v", v, Variable, "a `Variable` of the strategy")
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
        return isinstance(v, Variable) and v.strategy is self.strategy

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


def read_axes(axis: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Returns dimensions as a tuple; None stays None."""
    if axis is None:
        return None
    try:
        given = axis if isinstance(axis, (list, tuple)) else (axis,)
        return tuple(check_int("axis", one) for one in given)
    except UnsupportedError:
        raise UnsupportedError(
            f"`axis` must be an int, a sequence of ints or None, got {in_words(axis)}. To reduce "
            "to devices, write `strategy.extended.reduce_to(reduce_op, value, destinations)`."
        ) from None
