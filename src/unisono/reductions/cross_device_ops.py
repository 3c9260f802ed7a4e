"""The interface of all cross-device reductions, and what every one of them gets for free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, TypeAlias

from torch import Tensor

from unisono.arguments import check_instance, in_words
from unisono.devices import Device, this_machine
from unisono.errors import BatchError, ReplicaMismatchError, UnsupportedError
from unisono.kernels import check_layout, check_replicas, tree_reduce
from unisono.options import CommunicationOptions, ReduceOp, check_options
from unisono.reductions.destinations import Destinations, destinations_of
from unisono.tracing import span
from unisono.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    TensorLike,
    as_tensor,
    concatenate,
    is_sparse,
)

Result: TypeAlias = "Tensor | Mirrored"
Pair: TypeAlias = "tuple[DistributedValues, Destinations]"
Pairs: TypeAlias = Sequence[Pair]


class CrossDeviceOps:
    """Reduces the values of the replicas to devices, and copies values to devices.

    A subclass overrides `reduce_implementation`, and where it can do better than the defaults
    `batch_reduce_implementation` and `broadcast_implementation`. Arguments reach them checked and
    in one form: values as `PerReplica` of tensors that go together, destinations as `Destinations`.
    A value that is already alone on its only destination never reaches them.

    One that needs all gradients of a backward pass at once overrides
    `reduce_gradients_implementation`.
    """

    # Whether the implementation itself reads and checks the values that it is given.
    reads_values: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Of the classes that make up `cls`, the first that says something of it decides.
        for base in cls.__mro__:
            if "reads_values" in vars(base):
                break
            if not _IMPLEMENTATIONS.isdisjoint(vars(base)):
                cls.reads_values = False
                break

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Result:
        """Combines the components of a value and puts the result on the destinations.

        Args:
            reduce_op: How to combine them; a `ReduceOp` or its name.
            per_replica_value: A distributed value; or a tensor, or anything that can be read as
                one, which counts as the value of a single replica.
            destinations: Where the result goes: a device name, a tensor or variable (its devices;
                it is not changed), or a distributed value (the devices of its components). Pass
                the value itself for an all-reduce.
            options: Hints for this reduction.

        Returns:
            The tensor for one destination device, a `Mirrored` for several. It is detached, and
            shares no memory with the value or between its components.

        Raises:
            ValueError: If an argument is none of the above, or the components do not go together.
        """
        op = ReduceOp.read(reduce_op)
        value = _distributed(per_replica_value)
        targets = destinations_of(destinations)
        if not self.reads_values:
            value = _checked(op, value, "The value")
            if _is_alone(value, targets):
                return _copy_alone(op, value)
        with span("reduce", "reduce", op=op):
            return self.reduce_implementation(op, value, targets, check_options(options))

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Result]:
        """Reduces many values, as `reduce` does each.

        Args:
            reduce_op: How to combine the components of each value.
            value_destination_pairs: Tuples of a value and its destinations; see `reduce`.
            options: Hints for this batch.

        Returns:
            The results, in the order of the pairs.

        Raises:
            ValueError: If `value_destination_pairs` is not an iterable of `(value, destinations)`
                tuples, or for any reason of `reduce`. Then nothing has been reduced.
        """
        op = ReduceOp.read(reduce_op)
        pairs = [
            (_distributed(value), destinations_of(targets))
            for value, targets in listed_pairs(value_destination_pairs)
        ]
        options = check_options(options)
        with span("reduce", "batch_reduce", op=op, values=len(pairs)):
            if self.reads_values:
                return self.batch_reduce_implementation(op, pairs, options)
            pairs = [
                (_checked(op, value, f"Value {index} of the batch"), targets)
                for index, (value, targets) in enumerate(pairs)
            ]
            rest = [pair for pair in pairs if not _is_alone(*pair)]
            reduced = iter(self.batch_reduce_implementation(op, rest, options) if rest else [])
            return [
                _copy_alone(op, pair[0]) if _is_alone(*pair) else next(reduced) for pair in pairs
            ]

    def reduce_gradients(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Result]:
        """Reduces all gradients of a backward pass, where each goes. See `batch_reduce`.

        Strategies call it if `wants_all_gradients`.
        """
        op = ReduceOp.read(reduce_op)
        pairs = [
            (_checked(op, _distributed(value), f"Gradient {index}"), destinations_of(targets))
            for index, (value, targets) in enumerate(listed_pairs(value_destination_pairs))
        ]
        options = check_options(options)
        with span("reduce", "reduce_gradients", op=op, values=len(pairs)):
            return self.reduce_gradients_implementation(op, pairs, options)

    @property
    def wants_all_gradients(self) -> bool:
        """Whether all gradients of a backward pass come in one batch, when it has ended. Otherwise
        they come in packs, each as soon as all replicas have its gradients.
        """
        own = type(self).reduce_gradients_implementation
        return own is not CrossDeviceOps.reduce_gradients_implementation

    def broadcast(self, tensor: Any, destinations: Any) -> Result:
        """Copies a tensor to the destinations.

        Args:
            tensor: A tensor or a mirrored value, or anything that can be read as a tensor.
            destinations: Where the copies go; see `reduce`.

        Returns:
            The copy for one destination device, a `Mirrored` for several.

        Raises:
            ValueError: If `tensor` differs from replica to replica, or an argument is none of the
                above.
        """
        is_one = isinstance(tensor, TensorLike) and not isinstance(tensor, PerReplica)
        if isinstance(tensor, DistributedValues) and not is_one:
            raise ReplicaMismatchError(
                f"Only one tensor can be broadcast, got a {type(tensor).__name__} of "
                f"{len(tensor.values)} values. Reduce it, or pass one of its `values`."
            )
        given = as_tensor(tensor)
        check_layout(given, "The tensor")
        with span("copy", "broadcast"):
            return self.broadcast_implementation(given, destinations_of(destinations))

    @property
    def is_tree_sum(self) -> bool:
        """Whether it adds in the order of the tree, so that other code may do the sum instead."""
        return self.reads_values

    def close(self) -> None:
        """Releases what is kept for the next call, such as NCCL's communicators.

        Closing a strategy calls it. The operations can be used again. By default, nothing is kept.
        """

    def in_strategy(self) -> CrossDeviceOps:
        """Returns the operations that a strategy calls instead of these; by default, itself.

        Operations whose methods have the arguments or results of an older version return an
        adapter.
        """
        return self

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: DistributedValues,
        destinations: Destinations,
        options: CommunicationOptions,
    ) -> Result:
        """Does the work of `reduce`. Must be overridden.

        See `reduce`. The components of `per_replica_value` are tensors of one shape, dtype and
        layout, and the result goes to `destinations.devices`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must override `reduce_implementation(reduce_op, "
            "per_replica_value, destinations, options)`."
        )

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: CommunicationOptions
    ) -> list[Result]:
        """Does the work of `batch_reduce`. By default, it reduces one value after another.

        See `batch_reduce`. The values and destinations are those of `reduce_implementation`.
        """
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def reduce_gradients_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: CommunicationOptions
    ) -> list[Result]:
        """Reduces all gradients of a backward pass, if it is overridden.

        If it is not overridden, it is not called: gradients are reduced in packs, like other
        batches. See `batch_reduce`. The values are the gradients of each parameter that a replica
        has used. There may be one replica.
        """
        return self.batch_reduce_implementation(reduce_op, value_destination_pairs, options)

    def broadcast_implementation(self, tensor: Tensor, destinations: Destinations) -> Result:
        """Does the work of `broadcast`. By default, it copies to each device. See `broadcast`."""
        machine = this_machine()
        return mirrored(
            tuple(
                tensor.detach().to(machine.torch_device(device), copy=True)
                for device in destinations.devices
            ),
            destinations,
        )

    def reduce_in_place(
        self, reduce_op: ReduceOp, batch: Sequence[Sequence[Tensor]], devices: tuple[Device, ...]
    ) -> bool:
        """All-reduces tensors in place, one per replica, if that saves memory and time.

        Args:
            reduce_op: How to combine them.
            batch: For each value, the tensors of all replicas.
            devices: The device of each replica.

        Returns:
            Whether it was done. If not, nothing was changed: call `batch_reduce`.
        """
        return False


_IMPLEMENTATIONS = frozenset(
    ("reduce_implementation", "batch_reduce_implementation", "broadcast_implementation")
)


def check_ops(cross_device_ops: Any) -> None:
    """Raises unless it can reduce between devices, or is None."""
    if cross_device_ops is not None:
        check_instance(
            "cross_device_ops",
            cross_device_ops,
            CrossDeviceOps,
            "a `CrossDeviceOps`, such as `unisono.ReductionToOneDevice()`",
        )


def mirrored(tensors: tuple[Tensor, ...], destinations: Destinations) -> Result:
    """Returns a single tensor as it is, and several as a `Mirrored` on the destinations."""
    if len(tensors) == 1:
        return tensors[0]
    return Mirrored.placed(tensors, destinations.devices)


def always_mirrored(result: Result, destinations: Destinations) -> Mirrored:
    """Returns a result as a `Mirrored`, also for one destination."""
    if isinstance(result, Mirrored):
        return result
    return Mirrored.placed((result,), destinations.devices)


def _distributed(value: Any) -> DistributedValues:
    if not isinstance(value, DistributedValues):
        return PerReplica((as_tensor(value),))
    if not value.values:
        raise ReplicaMismatchError(
            f"Cannot reduce a {type(value).__name__} that holds no values. Give it one value per "
            "replica."
        )
    return value


def listed_pairs(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Returns a batch as a list, if it is an iterable of pairs."""
    try:
        iterator = iter(pairs)
    except (TypeError, RuntimeError, UnsupportedError) as error:
        raise BatchError(
            f"A batch is an iterable of (value, destinations) tuples, got {in_words(pairs)}. Write "
            "`[(value, value)]` for one value."
        ) from error
    given = list(iterator)
    for index, pair in enumerate(given):
        if not isinstance(pair, tuple) or len(pair) != 2:
            length = f" of length {len(pair)}" if isinstance(pair, tuple) else ""
            raise BatchError(
                f"A batch is an iterable of (value, destinations) tuples, but its entry {index} is "
                f"of type {type(pair).__name__}{length}. Write `[(value, value)]` for one value."
            )
    return given


def _checked(op: ReduceOp, value: DistributedValues, what: str) -> PerReplica:
    tensors = tuple(as_tensor(component) for component in value.values)
    check_replicas(op, tensors, what)
    return PerReplica.placed(tensors, value.devices)


def _is_alone(value: DistributedValues, destinations: Destinations) -> bool:
    return len(value.values) == 1 and value.devices == destinations.devices


def _copy_alone(op: ReduceOp, value: DistributedValues) -> Tensor:
    (tensor,) = value.values
    return concatenate(op, [tensor]) if is_sparse(tensor) else tree_reduce(op, [tensor])
