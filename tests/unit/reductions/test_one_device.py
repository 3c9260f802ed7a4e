from typing import Any

import pytest
import torch
from torch import Tensor

import unisono as uo
from unisono.devices import Device, cpu_slots, pretend
from unisono.errors import DeviceError, UnsupportedError
from unisono.reductions import Ends

pytestmark = pytest.mark.usefixtures("path", "memories")

SUM, MEAN = uo.ReduceOp.SUM, uo.ReduceOp.MEAN


def largest(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).amax(0)


def per_replica(*values: Any) -> uo.PerReplica:
    return uo.PerReplica([torch.tensor(value) for value in values])


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 5, 7])
def test_an_all_reduce_reaches_every_replica(num_replicas: int) -> None:
    ops = uo.ReductionToOneDevice()
    value = per_replica(*(10.0**i for i in range(num_replicas)))
    expected = float("1" * num_replicas)

    for _ in range(2):
        for op, total in ((SUM, expected), (MEAN, expected / num_replicas)):
            result = ops.reduce(op, value, value)

            parts = result.values if isinstance(result, uo.Mirrored) else (result,)
            assert [part.item() for part in parts] == [pytest.approx(total)] * num_replicas


def test_the_result_goes_to_a_device_that_holds_no_value() -> None:
    result = uo.ReductionToOneDevice().reduce(SUM, per_replica(1.0, 10.0), "/cpu:7")

    assert isinstance(result, Tensor)
    assert result.item() == 11


def test_a_variable_that_names_the_destination_is_not_changed() -> None:
    variable = torch.nn.Parameter(torch.zeros(()))

    assert uo.ReductionToOneDevice().reduce(SUM, per_replica(1.0, 10.0), variable) == 11
    assert variable.item() == 0


def test_destinations_in_any_order_get_their_copies() -> None:
    where = uo.Mirrored([0, 0, 0], devices=["/cpu:1", "/cpu:4", "/cpu:0"])

    result = uo.ReductionToOneDevice().reduce(SUM, per_replica(1.0, 10.0), where)

    assert isinstance(result, uo.Mirrored)
    assert result.devices == (Device("cpu", 1), Device("cpu", 4), Device("cpu", 0))
    assert [part.item() for part in result.values] == [11, 11, 11]


@pytest.mark.parametrize("device", ["/cpu:0", "/cpu:1", "/cpu:5"])
def test_values_meet_on_the_device_that_is_asked_for(device: str) -> None:
    ops = uo.ReductionToOneDevice(reduce_to_device=device)

    assert ops.reduce(SUM, per_replica(1.0, 10.0, 100.0), "/cpu:0") == 111
    assert ops.root(Ends(cpu_slots(3), cpu_slots(1))) is Device.parse(device)


def test_values_meet_on_the_first_destination_otherwise() -> None:
    ends = Ends(cpu_slots(2), (Device("cpu", 4), Device("cpu", 0)))

    assert uo.ReductionToOneDevice().root(ends) is Device("cpu", 4)


def test_a_device_that_is_absent_is_refused_when_the_operation_is_made() -> None:
    with pretend(gpus=()), pytest.raises(DeviceError, match="no cuda:0"):
        uo.ReductionToOneDevice("/gpu:0")


def test_an_accumulation_function_takes_the_place_of_the_sum() -> None:
    ops = uo.ReductionToOneDevice(accumulation_fn=largest)
    value = per_replica(1.0, 5.0, 3.0)

    for _ in range(2):
        assert ops.reduce(SUM, value, "/cpu:0") == 5
        assert ops.reduce(MEAN, value, "/cpu:0") == pytest.approx(5 / 3)


def test_an_accumulation_function_is_given_the_replicas_in_order() -> None:
    given = []

    def first(parts: list[Tensor]) -> Tensor:
        given.append([part.item() for part in parts])
        return parts[0]

    ops = uo.ReductionToOneDevice("/cpu:1", first)
    ops.batch_reduce(SUM, [(per_replica(1.0, 2.0, 3.0), "/cpu:0"), (per_replica(4.0), "/cpu:1")])

    assert given == [[1, 2, 3], [4]]


def test_what_an_accumulation_function_returns_is_copied() -> None:
    ops = uo.ReductionToOneDevice(accumulation_fn=lambda parts: parts[0])
    value = per_replica([1.0], [2.0])

    result = ops.reduce(SUM, value, value)

    assert isinstance(result, uo.Mirrored)
    pointers = {part.data_ptr() for part in (*value.values, *result.values)}
    assert len(pointers) == 4


def test_a_value_alone_on_its_destination_is_not_accumulated() -> None:
    ops = uo.ReductionToOneDevice(accumulation_fn=lambda parts: parts[0] * 100)

    assert ops.reduce(SUM, per_replica(7.0), "/cpu:0") == 7


@pytest.mark.parametrize("op", [uo.ReduceOp.MAX, uo.ReduceOp.MIN, uo.ReduceOp.PROD])
def test_an_accumulation_function_has_a_sum_and_a_mean_only(op: uo.ReduceOp) -> None:
    ops = uo.ReductionToOneDevice(accumulation_fn=largest)

    with pytest.raises(UnsupportedError, match=f"got {op}"):
        ops.reduce(op, per_replica(1.0, 2.0), "/cpu:0")


def test_what_is_no_accumulation_function_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="`accumulation_fn` must be a function"):
        uo.ReductionToOneDevice(accumulation_fn=3)  # type: ignore[arg-type]
    ops = uo.ReductionToOneDevice(accumulation_fn=lambda parts: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(UnsupportedError, match=r"`accumulation_fn\(tensors\)` must be a tensor"):
        ops.reduce(SUM, per_replica(1.0, 2.0), "/cpu:0")


def test_sparse_values_are_never_accumulated() -> None:
    ops = uo.ReductionToOneDevice(accumulation_fn=largest)
    value = uo.PerReplica([torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse()])

    result = ops.reduce(SUM, value, "/cpu:0")

    assert isinstance(result, Tensor)
    assert result.is_sparse
    assert result.to_dense().tolist() == [[2, 1], [1, 2]]


@pytest.mark.parametrize(
    ("op", "expected"), [(uo.ReduceOp.MIN, 2), (uo.ReduceOp.MAX, 5), (uo.ReduceOp.PROD, 30)]
)
def test_minimum_maximum_and_product_are_reductions_too(op: uo.ReduceOp, expected: int) -> None:
    assert uo.ReductionToOneDevice().reduce(op, per_replica(3, 2, 5), "/cpu:1") == expected


def test_replicas_may_share_a_device() -> None:
    value = uo.PerReplica([torch.tensor(10.0**i) for i in range(4)], devices=["/cpu:0"] * 4)

    result = uo.ReductionToOneDevice().reduce(SUM, value, value)

    assert isinstance(result, uo.Mirrored)
    assert [part.item() for part in result.values] == [1111] * 4
