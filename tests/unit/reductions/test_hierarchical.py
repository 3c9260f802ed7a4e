from typing import Any

import pytest
import torch
from recorded_machines import on
from tables import every

import unisono as uo
from unisono.algorithms import Copy, Gather, Plan, Spread, make_plan
from unisono.devices import Device, Groups, cpu_slots, near_groups
from unisono.testing import separate_memories

SUM, MEAN = uo.ReduceOp.SUM, uo.ReduceOp.MEAN


@pytest.mark.usefixtures("path", "memories")
@every("num_replicas", range(1, 10))
@every("num_packs", [0, 1, 2, 9])
def test_every_replica_is_counted(num_replicas: int, num_packs: int) -> None:
    ops = uo.HierarchicalCopyAllReduce(num_packs)
    value = uo.PerReplica([torch.full((5,), 10**i) for i in range(num_replicas)])

    for _ in range(2):
        result: Any = ops.batch_reduce(SUM, [(value, value)])[0]

        parts = result.values if num_replicas > 1 else (result,)
        assert [part.unique().tolist() for part in parts] == [[int("1" * num_replicas)]] * len(
            parts
        )


@pytest.mark.parametrize("num_packs", [0, 1, 2, 3, 4, 8, 100])
def test_the_number_of_packs_never_changes_a_result(num_packs: int) -> None:
    values = [
        uo.PerReplica([torch.tensor(1.0), torch.tensor(2.0)]),
        uo.PerReplica([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])]),
        uo.PerReplica([torch.tensor([[1.0, 1], [2, 2]]), torch.tensor([[3.0, 3], [4, 4]])]),
    ]

    with separate_memories():
        results: list[Any] = uo.HierarchicalCopyAllReduce(num_packs).batch_reduce(
            SUM, [(value, value) for value in values]
        )

    assert [result.values[1].tolist() for result in results] == [3, [5, 7, 9], [[4, 4], [6, 6]]]


def test_the_schedule_is_two_level_over_halves() -> None:
    schedule = uo.HierarchicalCopyAllReduce().all_reduce_schedule(cpu_slots(3), turn=1)

    assert schedule == (Gather(1, (0,)), Gather(1, (2,)), Spread(1, (2,)), Spread(1, (0,)))


def test_the_schedule_follows_the_links_of_the_machine() -> None:
    # 0 and 1 are on one PCIe switch, 2 and 3 on another.
    devices = tuple(Device("cuda", i) for i in (0, 2, 1, 3))

    with on("pcie_4"):
        schedule = uo.HierarchicalCopyAllReduce().all_reduce_schedule(devices, turn=0)

    assert schedule[:2] == (Gather(0, (2,)), Gather(1, (3,)))


@pytest.mark.parametrize(
    ("machine", "num_gpus"), [("dgx_1", 8), ("dgx_h100", 8), ("pcie_4", 4), ("dgx_1", 7)]
)
def test_one_tensor_crosses_between_groups_and_one_comes_back(machine: str, num_gpus: int) -> None:
    devices = tuple(Device("cuda", i) for i in range(num_gpus))
    everywhere = tuple(range(num_gpus))

    with on(machine):
        groups = near_groups(devices)
        for turn in everywhere:
            schedule = uo.HierarchicalCopyAllReduce().all_reduce_schedule(devices, turn)
            plan = make_plan(schedule, num_gpus, everywhere, everywhere)

            assert plan.num_copies == 2 * (num_gpus - 1)
            assert num_crossings(plan, groups) == 2


def num_crossings(plan: Plan, groups: Groups) -> int:
    """How many tensors travel from one group to another."""
    group_of = {place: group for group in groups for place in group}
    place_of = {replica: replica for replica in range(plan.num_replicas)}
    crossings = 0
    for step in plan.steps:
        if isinstance(step, Copy):
            crossings += group_of[place_of[step.source]] != group_of[step.place]
            place_of[step.target] = step.place
        else:
            place_of.update(dict.fromkeys(step.targets, place_of[step.sources[0]]))
    return crossings
