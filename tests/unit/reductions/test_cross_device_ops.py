"""What a reduction of a user's own gets for free, and what reaches it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import unisono as uo
from unisono.devices import Device, cpu_slots
from unisono.errors import BatchError, DestinationError, ReplicaMismatchError, UnsupportedError
from unisono.experimental import CommunicationOptions
from unisono.reductions import Destinations, Pair, Result, mirrored

SUM, MEAN = uo.ReduceOp.SUM, uo.ReduceOp.MEAN


class Recording(uo.CrossDeviceOps):
    """Adds by hand, and remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def reduce_implementation(
        self,
        reduce_op: uo.ReduceOp,
        per_replica_value: uo.DistributedValues,
        destinations: Destinations,
        options: CommunicationOptions,
    ) -> Result:
        self.calls.append((reduce_op, per_replica_value, destinations, options))
        total = sum(per_replica_value.values)
        return mirrored(tuple(total.clone() for _ in destinations.devices), destinations)


class RecordingToOneDevice(uo.ReductionToOneDevice):
    """A built-in reduction with an override."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[uo.DistributedValues] = []

    def reduce_implementation(
        self,
        reduce_op: uo.ReduceOp,
        per_replica_value: uo.DistributedValues,
        destinations: Destinations,
        options: CommunicationOptions,
    ) -> Result:
        self.values.append(per_replica_value)
        return super().reduce_implementation(reduce_op, per_replica_value, destinations, options)


def powers(num_replicas: int = 3) -> uo.PerReplica:
    return uo.PerReplica([torch.tensor(10.0**i) for i in range(num_replicas)])


def test_an_override_is_given_everything_in_one_form() -> None:
    ops = Recording()

    result = ops.reduce(SUM, uo.Mirrored([1.0, np.array(10.0, "float32")]), "/cpu:1")

    ((op, value, destinations, options),) = ops.calls
    assert isinstance(result, Tensor)
    assert result.item() == 11
    assert op is SUM
    assert isinstance(value, uo.PerReplica)
    assert all(isinstance(part, Tensor) for part in value.values)
    assert value.devices == cpu_slots(2)
    assert destinations == Destinations((Device("cpu", 1),))
    assert options == CommunicationOptions()


def test_options_reach_an_override_as_they_are() -> None:
    ops, options = Recording(), CommunicationOptions(bytes_per_pack=7)

    ops.reduce(SUM, powers(), "/cpu:0", options)
    ops.batch_reduce(SUM, [(powers(), "/cpu:0")], options)

    assert [call[3] for call in ops.calls] == [options, options]


def test_several_destinations_give_a_mirrored_and_one_a_tensor() -> None:
    ops = Recording()

    for _ in range(2):
        everywhere = ops.reduce(SUM, powers(), powers())
        somewhere = ops.reduce(SUM, powers(), "/cpu:5")

        assert isinstance(everywhere, uo.Mirrored)
        assert [part.item() for part in everywhere.values] == [111, 111, 111]
        assert isinstance(somewhere, Tensor)


def test_a_batch_is_one_reduction_after_another_unless_overridden() -> None:
    ops = Recording()

    results = ops.batch_reduce(SUM, [(powers(2), "/cpu:0"), (powers(3), "/cpu:1")])

    assert [int(result) for result in results] == [11, 111]
    assert [call[2].devices[0].index for call in ops.calls] == [0, 1]


@pytest.mark.parametrize("make", [iter, tuple, list, lambda pairs: zip(*zip(*pairs))])  # noqa: B905
def test_any_iterable_of_pairs_is_a_batch(make: Any) -> None:
    results = Recording().batch_reduce(SUM, make([(powers(2), "/cpu:0"), (powers(3), "/cpu:1")]))

    assert [int(result) for result in results] == [11, 111]


@pytest.mark.parametrize("op", [SUM, MEAN])
def test_a_value_alone_on_its_only_destination_never_reaches_an_override(op: uo.ReduceOp) -> None:
    ops, tensor = Recording(), torch.tensor([7.0])
    value = uo.PerReplica([tensor], devices=["/cpu:2"])

    alone = ops.reduce(op, value, "/cpu:2")
    first, second = ops.batch_reduce(op, [(value, "/cpu:2"), (powers(2), "/cpu:0")])

    assert isinstance(alone, Tensor)
    assert alone.tolist() == [7]
    assert alone.data_ptr() != tensor.data_ptr()
    assert isinstance(first, Tensor)
    assert first.tolist() == [7]
    assert second == 11
    assert len(ops.calls) == 1


def test_a_batch_of_values_that_are_alone_calls_nothing() -> None:
    ops = Recording()

    assert ops.batch_reduce(SUM, [(3.0, "/cpu:0"), (4.0, "/cpu:0")]) == [3, 4]
    assert ops.batch_reduce(SUM, []) == []
    assert ops.calls == []


def test_one_value_for_another_device_does_reach_an_override() -> None:
    ops = Recording()

    ops.reduce(SUM, 5.0, "/cpu:2")

    assert len(ops.calls) == 1


def test_a_value_that_does_not_go_together_never_reaches_an_override() -> None:
    ops = Recording()
    odd = uo.PerReplica([torch.ones(1), torch.ones(2)])

    with pytest.raises(ReplicaMismatchError, match="The value must have the same shape"):
        ops.reduce(SUM, odd, "/cpu:0")
    with pytest.raises(ReplicaMismatchError, match="Value 1 of the batch must have the same shape"):
        ops.batch_reduce(SUM, [(powers(), "/cpu:0"), (odd, "/cpu:0")])

    assert ops.calls == []


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (uo.PerReplica([]), "holds no values"),
        (None, "Cannot read None"),
        ([[1.0, 2.0], [3.0]], "Cannot read"),
        (uo.PerReplica([1.0, None]), "Cannot read None"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("ops", [Recording(), uo.ReductionToOneDevice()])
def test_what_cannot_be_reduced_is_refused(ops: uo.CrossDeviceOps, value: Any, error: str) -> None:
    with pytest.raises(ReplicaMismatchError, match=error):
        ops.reduce(SUM, value, "/cpu:0")


def test_destinations_are_checked_before_the_value_is_reduced() -> None:
    with pytest.raises(DestinationError):
        Recording().reduce(SUM, powers(), ["/cpu:0"])


@pytest.mark.parametrize("op", ["total", None, uo.VariableAggregation.SUM])
def test_the_operation_is_always_checked(op: Any) -> None:
    ops = Recording()

    with pytest.raises(UnsupportedError, match="reduce_op"):
        ops.reduce(op, 7.0, "/cpu:0")
    with pytest.raises(UnsupportedError, match="reduce_op"):
        ops.batch_reduce(op, [])


@pytest.mark.parametrize(
    ("pairs", "shown"),
    [
        (None, "got None"),
        (7, "got 7"),
        (uo.PerReplica([1.0, 2.0]), "got PerReplica"),
        ([[1.0, "/cpu:0"]], "entry 0 is of type list"),
        ([(1.0, "/cpu:0"), (1.0, "/cpu:0", "x")], "entry 1 is of type tuple of length 3"),
        ([1.0], "entry 0 is of type float"),
    ],
    ids=repr,
)
def test_what_is_no_batch_is_refused_and_shown(pairs: Any, shown: str) -> None:
    with pytest.raises(BatchError, match=shown):
        Recording().batch_reduce(SUM, pairs)


@pytest.mark.parametrize("tensor", [7, [7], np.array(7.0), torch.tensor(7), uo.Mirrored([7, 7])])
def test_a_broadcast_copies_to_every_destination(tensor: Any) -> None:
    for _ in range(2):
        everywhere = Recording().broadcast(tensor, powers())
        somewhere = Recording().broadcast(tensor, "/cpu:1")

        assert isinstance(everywhere, uo.Mirrored)
        assert [int(part) for part in everywhere.values] == [7, 7, 7]
        assert everywhere.devices == cpu_slots(3)
        assert isinstance(somewhere, Tensor)
        assert int(somewhere) == 7


def test_broadcast_copies_share_no_memory() -> None:
    tensor = torch.ones(2, requires_grad=True)

    result = Recording().broadcast(tensor, powers())

    assert isinstance(result, uo.Mirrored)
    assert len({part.data_ptr() for part in (tensor, *result.values)}) == 4
    assert not any(part.requires_grad for part in result.values)


def test_a_broadcast_can_be_overridden() -> None:
    class Halved(uo.CrossDeviceOps):
        def broadcast_implementation(self, tensor: Tensor, destinations: Destinations) -> Result:
            return mirrored(tuple(tensor / 2 for _ in destinations.devices), destinations)

    assert Halved().broadcast(7, "/cpu:1") == 3.5


def test_a_batch_can_be_overridden() -> None:
    class Reversed(Recording):
        def batch_reduce_implementation(
            self,
            reduce_op: uo.ReduceOp,
            value_destination_pairs: Sequence[Pair],
            options: CommunicationOptions,
        ) -> list[Result]:
            backwards = list(value_destination_pairs)[::-1]
            return super().batch_reduce_implementation(reduce_op, backwards, options)[::-1]

    ops = Reversed()

    results = ops.batch_reduce(SUM, [(powers(2), "/cpu:0"), (powers(3), "/cpu:1")])

    assert [int(result) for result in results] == [11, 111]
    assert [len(call[1].values) for call in ops.calls] == [3, 2]


def test_without_an_override_the_error_says_which_one_is_missing() -> None:
    with pytest.raises(NotImplementedError, match="CrossDeviceOps must override `reduce_impl"):
        uo.CrossDeviceOps().reduce(SUM, powers(), "/cpu:0")


def test_an_override_in_a_subclass_of_a_builtin_is_given_checked_tensors() -> None:
    ops = RecordingToOneDevice()

    result = ops.reduce(SUM, uo.PerReplica([1, np.array(10)]), "/cpu:1")

    assert result == 11
    assert all(isinstance(part, Tensor) for part in ops.values[0].values)
    with pytest.raises(ReplicaMismatchError):
        ops.reduce(SUM, uo.PerReplica([torch.ones(1), torch.ones(2)]), "/cpu:0")
    assert ops.reduce(SUM, 7.0, "/cpu:0") == 7
    assert len(ops.values) == 1


def test_an_override_in_a_subclass_of_a_builtin_is_used_for_batches_too() -> None:
    ops = RecordingToOneDevice()

    ops.batch_reduce(SUM, [(powers(), "/cpu:0"), (powers(), "/cpu:1")])

    assert len(ops.values) == 2


def test_a_subclass_of_a_builtin_without_an_override_is_not_slowed_down() -> None:
    class Named(uo.ReductionToOneDevice):
        name = "mine"

    assert Named.reads_values
    assert not RecordingToOneDevice.reads_values
