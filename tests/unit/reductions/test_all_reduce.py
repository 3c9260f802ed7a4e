from typing import Any

import pytest
import torch
from torch import Tensor

import unisono as uo
from unisono.algorithms import Schedule
from unisono.devices import Device, cpu_slots
from unisono.errors import UnsupportedError
from unisono.experimental import CommunicationOptions
from unisono.packing import NoPacking, NumPacks, PackingRule, SmallGroups
from unisono.reductions import AllReduce, Ends
from unisono.reductions.all_reduce import is_all_reduce, packing_of
from unisono.testing import separate_memories

SUM = uo.ReduceOp.SUM


class CountingAllReduce(AllReduce):
    """Remembers the sizes of the packs that were reduced, and the schedules that were made."""

    def __init__(self, num_packs: int | PackingRule = 1) -> None:
        super().__init__(num_packs)
        self.sizes: list[int] = []
        self.schedules: list[Schedule] = []

    def all_reduce_schedule(self, devices: tuple[Device, ...], turn: int) -> Schedule:
        self.schedules.append(super().all_reduce_schedule(devices, turn))
        return self.schedules[-1]

    def reduce_packs(self, op: uo.ReduceOp, packs: Any, ends: Ends) -> list[tuple[Tensor, ...]]:
        self.sizes += [pack[0].numel() for pack in packs]
        return super().reduce_packs(op, packs, ends)


def batch(*sizes: int) -> list[tuple[uo.PerReplica, uo.PerReplica]]:
    values = [uo.PerReplica([torch.full((n,), 10.0**i) for i in range(3)]) for n in sizes]
    return list(zip(values, values, strict=True))


@pytest.mark.parametrize(
    ("num_packs", "sizes"),
    [
        (0, [1, 3, 4]),
        (1, [8]),
        (2, [4, 4]),
        (3, [2, 2, 4]),
        (5, [1, 1, 1, 1, 4]),
        (9, [0, 0, 0, 0, 0, 0, 0, 0, 8]),
        (SmallGroups(12, 10), [4, 4]),
    ],
    ids=str,
)
def test_a_batch_travels_in_the_packs_that_were_asked_for(
    num_packs: int | PackingRule, sizes: list[int]
) -> None:
    ops = CountingAllReduce(num_packs)

    with separate_memories():
        results: list[Any] = ops.batch_reduce(SUM, batch(1, 3, 4))

    assert ops.sizes == sizes
    for result, size in zip(results, (1, 3, 4), strict=True):
        assert [part.tolist() for part in result.values] == [[111] * size] * 3


def test_bytes_per_pack_takes_the_place_of_the_number_of_packs() -> None:
    ops = CountingAllReduce(1)

    with separate_memories():
        ops.batch_reduce(SUM, batch(2, 2, 2, 2), CommunicationOptions(bytes_per_pack=8))
        ops.batch_reduce(SUM, batch(2, 2, 2, 2))

    assert ops.sizes == [4, 4, 8]


def test_inside_one_memory_nothing_is_packed() -> None:
    ops = CountingAllReduce(1)

    ops.batch_reduce(SUM, batch(1, 3, 4))

    assert ops.sizes == []


def test_successive_packs_take_successive_roots() -> None:
    ops = CountingAllReduce(4)

    with separate_memories():
        ops.batch_reduce(SUM, batch(8))

    assert [schedule[0].root for schedule in ops.schedules] == [0, 1, 2]


def test_values_for_other_devices_meet_on_the_first_of_them() -> None:
    ops = CountingAllReduce(2)
    value = batch(4)[0][0]

    with separate_memories():
        result: Any = ops.reduce(SUM, value, "/cpu:5")

    assert result.tolist() == [111] * 4
    assert ops.sizes == []


@pytest.mark.parametrize(
    ("sources", "destinations", "expected"),
    [
        ("012", "012", True),
        ("012", "210", True),
        ("0", "0", True),
        ("012", "01", False),
        ("01", "012", False),
        ("01", "23", False),
        ("00", "00", False),
        ("01", "011", False),
    ],
)
def test_an_all_reduce_brings_results_just_where_the_values_are(
    sources: str, destinations: str, expected: bool
) -> None:
    slots = cpu_slots(4)
    ends = Ends(tuple(slots[int(i)] for i in sources), tuple(slots[int(i)] for i in destinations))

    assert is_all_reduce(ends) == expected


def test_a_number_of_packs_means_a_rule_and_a_rule_itself() -> None:
    rule = SmallGroups(100, 10)

    assert packing_of(0) == NoPacking()
    assert packing_of(3) == NumPacks(3)
    assert packing_of(rule) is rule


@pytest.mark.parametrize("make", [AllReduce, uo.NcclAllReduce, uo.HierarchicalCopyAllReduce])
def test_a_negative_number_of_packs_is_refused(make: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"0 \(no packing\) .*got -1"):
        make(num_packs=-1)


@pytest.mark.parametrize("make", [AllReduce, uo.NcclAllReduce, uo.HierarchicalCopyAllReduce])
@pytest.mark.parametrize("wrong", ["2", 1.5, True, None])
def test_a_number_of_packs_is_an_int(make: Any, wrong: Any) -> None:
    with pytest.raises(UnsupportedError, match="`num_packs` must be an int"):
        make(num_packs=wrong)
