import logging
import warnings
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import unisono as uo
from unisono.contrib import AllReduceCrossDeviceOps
from unisono.devices import Device, cpu_slots
from unisono.errors import BatchError, DestinationError, DeviceError, UnsupportedError
from unisono.testing import separate_memories

SUM, MEAN = uo.ReduceOp.SUM, uo.ReduceOp.MEAN
LISTED = ["/cpu:0", "/cpu:1", "/cpu:2"]

in_every_way = pytest.mark.usefixtures("path", "memories")


def older(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(uo.contrib, name)


each_ops = pytest.mark.parametrize(
    "make",
    [
        AllReduceCrossDeviceOps,
        lambda: AllReduceCrossDeviceOps("hierarchical_copy"),
        lambda: AllReduceCrossDeviceOps("hierarchical_copy", num_packs=0),
        lambda: AllReduceCrossDeviceOps("hierarchical_copy", 0, 100, 2),
        older("ReductionToOneDeviceCrossDeviceOps"),
    ],
    ids=["nccl", "hierarchical", "unpacked", "small groups", "one device"],
)


def powers(num_replicas: int = 3) -> uo.PerReplica:
    return uo.PerReplica([torch.tensor(10.0**i) for i in range(num_replicas)])


def numbers(result: uo.Mirrored) -> list[Any]:
    assert type(result) is uo.Mirrored
    return [part.tolist() for part in result.values]


@in_every_way
@each_ops
def test_a_list_of_devices_is_a_destination(make: Any) -> None:
    ops = make()

    for _ in range(2):
        result = ops.reduce(SUM, powers(), LISTED)

        assert numbers(result) == [111, 111, 111]
        assert result.devices == cpu_slots(3)


@in_every_way
@each_ops
@pytest.mark.parametrize("destinations", ["/cpu:1", ["/cpu:1"], ("cpu:1",)])
def test_one_destination_gives_a_mirrored_too(make: Any, destinations: Any) -> None:
    ops = make()

    results = [
        ops.reduce(SUM, powers(), destinations),
        *ops.batch_reduce(SUM, [(powers(), destinations)]),
        ops.broadcast(111.0, destinations),
    ]

    for result in results:
        assert numbers(result) == [111]
        assert result.devices == (Device("cpu", 1),)


@in_every_way
@each_ops
def test_batches_keep_their_order(make: Any) -> None:
    pairs = [(powers(2), "/cpu:0"), (powers(3), LISTED), (powers(2), powers(2)), (7.0, "/cpu:0")]

    for _ in range(2):
        results = make().batch_reduce(MEAN, pairs)

        assert list(map(numbers, results)) == [[5.5], [37] * 3, [5.5, 5.5], [7]]


@each_ops
def test_a_broadcast_goes_to_every_device_of_a_list(make: Any) -> None:
    assert numbers(make().broadcast(torch.ones(2), LISTED)) == [[1, 1]] * 3


@each_ops
def test_an_empty_list_names_no_device(make: Any) -> None:
    with pytest.raises(DestinationError, match="empty list"):
        make().reduce(SUM, powers(), [])


@each_ops
def test_every_name_of_a_list_is_read(make: Any) -> None:
    with pytest.raises(DeviceError, match="'tpu:0'"):
        make().reduce(SUM, powers(), ["/cpu:0", "/tpu:0"])


@each_ops
@pytest.mark.parametrize("pairs", [None, [[7.0, "/cpu:0"]], [(7.0,)]], ids=repr)
def test_a_batch_is_made_of_pairs(make: Any, pairs: Any) -> None:
    with pytest.raises(BatchError, match=r"\(value, destinations\) tuples, (got|but its entry 0)"):
        make().batch_reduce(SUM, pairs)


@pytest.mark.parametrize("wrong", ["ring", "NCCL", "", None])
def test_an_unknown_algorithm_is_refused_and_shown(wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"'nccl' or 'hierarchical_copy', got {wrong!r}"):
        AllReduceCrossDeviceOps(wrong)


def test_a_negative_number_of_packs_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="got -1"):
        AllReduceCrossDeviceOps("hierarchical_copy", num_packs=-1)


class CountCopies(TorchDispatchMode):
    """Counts the tensors that are copied from one device to another."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_copies += func.overloadpacket is torch.ops.aten._to_copy
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("arguments", "num_packs"),
    [
        ((), 1),
        ((2,), 2),
        ((2, 100, 4), 2),
        ((0,), 4),
        ((0, 100, 4), 1),
        ((0, 100, 2), 2),
        ((0, 100, 3), 2),
        ((0, 3, 4), 4),
    ],
    ids=str,
)
def test_a_number_of_packs_comes_before_small_groups(
    arguments: tuple[int, ...], num_packs: int
) -> None:
    ops, value = AllReduceCrossDeviceOps("hierarchical_copy", *arguments), powers(3)

    with separate_memories(), CountCopies() as copies:
        ops.batch_reduce(SUM, [(value, value)] * 4)

    # Two values to the root, and the result to the two others.
    assert copies.num_copies == 4 * num_packs


@pytest.mark.parametrize(("max_bytes", "max_group"), [(0, 10), (100, 0), (-1, 10)])
def test_a_limit_of_zero_turns_small_groups_off(max_bytes: int, max_group: int) -> None:
    ops = AllReduceCrossDeviceOps("hierarchical_copy", 0, max_bytes, max_group)

    assert numbers(ops.reduce(SUM, powers(), LISTED)) == [111, 111, 111]


def test_the_default_is_nccl_and_says_once_when_it_is_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ops = AllReduceCrossDeviceOps()

    with caplog.at_level(logging.INFO, logger="unisono"):
        ops.reduce(SUM, powers(), LISTED)
        ops.reduce(SUM, powers(), LISTED)

    assert len(caplog.records) == 1


def test_the_older_reduction_to_one_device_takes_the_same_arguments() -> None:
    ops = older("ReductionToOneDeviceCrossDeviceOps")("/cpu:1", lambda parts: parts[2])

    assert numbers(ops.reduce(SUM, powers(), "/cpu:0")) == [100]
