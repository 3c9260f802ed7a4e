"""Unusual and wrong calls, made over the backend and over Gloo, which must do the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    DebugLevel,
    GatherOptions,
    PrefixStore,
    ReduceOptions,
    ReduceScatterOptions,
    Store,
    set_debug_level,
)
from torch.distributed import ReduceOp
from torch.distributed import _functional_collectives as functional
from torch.utils._pytree import tree_map_only

from processes.backend_cases import World, all_gather_single, joined, reduce_scatter_single
from processes.harness import run_ranks
from unisono.communicators.stores import say_to_all

pytestmark = pytest.mark.backend

Call = Callable[[World], Any]
# Longer than a test may take, so that the test sees a timeout that is ignored.
GROUP_SECONDS = 300.0
CALL_TIMEOUT = timedelta(milliseconds=100)
NUMBERS = torch.arange(3.0)


def with_fields(options: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def moved(world: World, *, later: bool) -> list[Any]:
    """The outputs of one call of each kind."""

    def done(call: Any, *args: Any) -> None:
        work = call(*args, group=world.group, async_op=later)
        if work is not None:
            work.wait()

    transposed, told = torch.ones(2, 3).t(), torch.ones(3, 2).t() * world.rank
    whole, parts = torch.zeros(2 * world.size), [torch.zeros(2) for _ in range(world.size)]
    part, listed, exchanged = torch.zeros(2), torch.zeros(2), torch.zeros(world.size)
    own = torch.ones(2) * world.rank
    done(distributed.all_reduce, transposed)
    done(distributed.broadcast, told, 1)
    done(all_gather_single, whole, own)
    done(distributed.all_gather, parts, own)
    done(reduce_scatter_single, part, own.repeat(world.size))
    done(distributed.reduce_scatter, listed, [own] * world.size)
    done(distributed.all_to_all_single, exchanged, torch.ones(world.size) * world.rank)
    return [transposed, told, whole, parts, part, listed, exchanged]


def inference_mode(world: World) -> Any:
    with torch.inference_mode():
        return [moved(world, later=later) for later in (False, True)]


def functional_inference(world: World) -> Any:
    group, own = low_level(world), torch.ones(2) * world.rank
    with torch.inference_mode():
        found = [
            functional.all_gather_tensor(own, 0, group),
            functional.all_reduce(own, "sum", group),
            functional.reduce_scatter_tensor(own.repeat(world.size), "sum", 0, group),
            functional.broadcast(own, 0, group),
            *functional.all_reduce_coalesced([own, own + 1], "sum", group),
            *functional.all_gather_into_tensor_coalesced([own, own + 1], group),
        ]
        return [one.clone() for one in found]


def coalesced(*tensors: Tensor) -> Call:
    def call(world: World) -> Any:
        whole = NUMBERS + world.rank
        given = [whole, whole] if not tensors else [whole[:2], whole[1:]]
        low_level(world).allreduce_coalesced(given).wait()
        return whole

    return call


def low_level(world: World) -> Any:
    return world.group or distributed.group.WORLD


def several(op: Any) -> Call:
    def call(world: World) -> Any:
        tensors = [NUMBERS + world.rank + more for more in (1, 3)]
        work = low_level(world).allreduce(tensors, with_fields(AllreduceOptions(), reduceOp=op))
        work.wait()
        return [tensors, work.get_future().wait()]

    return call


def several_sparse(world: World) -> Any:
    index = torch.tensor([[world.rank]])
    tensors = [
        torch.sparse_coo_tensor(index, torch.tensor([value]), (4,), check_invariants=True)
        for value in (1.0, 2.0)
    ]
    low_level(world).allreduce(tensors).wait()
    return [one.to_dense() for one in tensors]


def several_broadcast(world: World) -> Any:
    tensors = [NUMBERS + world.rank, NUMBERS + world.rank + 10]
    options = with_fields(BroadcastOptions(), rootRank=1, rootTensor=1)
    low_level(world).broadcast(tensors, options).wait()
    return tensors


def several_gathered(world: World) -> Any:
    own = [NUMBERS + world.rank, NUMBERS + world.rank + 10]
    outputs = [[torch.zeros(3) for _ in range(2 * world.size)] for _ in own]
    low_level(world).allgather(outputs, own).wait()
    return outputs


def counted(world: World) -> int:
    """By how much a sum and a gathering raise the sequence number."""
    before: int = low_level(world)._get_sequence_number_for_group()
    distributed.all_reduce(torch.ones(1), group=world.group)
    outputs = [torch.zeros(1) for _ in range(world.size)]
    distributed.gather(ONE, outputs if world.rank == 0 else None, group_dst=0, group=world.group)
    after: int = low_level(world)._get_sequence_number_for_group()
    return after - before


def split(world: World) -> Any:
    """Sums in parts of a group, which only some ranks have.

    This is not compared with Gloo, whose `split_group` hangs now and then: one rank has connected
    to the other, which still waits for the connection.
    """
    sums: list[float | None] = []
    for ranks in ([0, 1], [1], [0, 1]):
        part = low_level(world).split_group(ranks, group_name=f"part {len(sums)}")
        total = torch.ones(1)
        if part is not None:
            assert part.group_name == f"part {len(sums)}"
            part.allreduce([total]).wait()
            assert (part.rank(), part.size()) == (ranks.index(world.rank), len(ranks))
        sums.append(total.item() if part is not None else None)
        # A part ends with the last reference to it, which must not be while another rank uses it.
        distributed.barrier(group=world.group)
    return sums


def boolean(op: Any) -> Call:
    def call(world: World) -> Any:
        own = torch.tensor([True, world.rank == 0, False])
        everywhere, at_first, part = own.clone(), own.clone(), torch.zeros_like(own)
        distributed.all_reduce(everywhere, op, group=world.group)
        distributed.reduce(at_first, 0, op, group=world.group)
        reduce_scatter_single(part, own.repeat(world.size), op, group=world.group)
        return [everywhere, at_first if world.rank == 0 else None, part]

    return call


ONE, DOUBLE, TWO = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(2)
ROWS = torch.sparse_coo_tensor(torch.tensor([[0]]), ONE, (1,), check_invariants=True)


def wrong(call: Callable[[Any], Any]) -> Call:
    """A call of a method of a group of two that must raise."""
    return lambda world: call(low_level(world)).wait()


RIGHT: dict[str, Call] = {
    "inference mode": inference_mode,
    "functional inference": functional_inference,
    "the same tensor twice": coalesced(),
    "overlapping tensors": coalesced(ONE),
    "sequence number": counted,
    "several sums": several(ReduceOp.SUM),
    "several products": several(ReduceOp.PRODUCT),
    "several maxima": several(ReduceOp.MAX),
    "several sparse": several_sparse,
    "several to broadcast": several_broadcast,
    "several to gather": several_gathered,
    **{
        f"bool {op}": boolean(op)
        for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
    },
    **{f"bool {op}": boolean(op) for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)},
}
WRONG: dict[str, Call] = {
    "reduce to 99": lambda world: distributed.reduce(ONE, group_dst=99, group=world.group),
    "broadcast from 99": lambda world: distributed.broadcast(ONE, group_src=99, group=world.group),
    "gather to 99": lambda world: distributed.gather(ONE, group_dst=99, group=world.group),
    "split without a device": lambda world: distributed.split_group(world.group, [[0], [1]]),
    "mean of bool": boolean(ReduceOp.AVG),
    "negative root": wrong(
        lambda group: group.reduce([ONE], with_fields(ReduceOptions(), rootRank=-1))
    ),
    "second root tensor of one": wrong(
        lambda group: group.broadcast([ONE], with_fields(BroadcastOptions(), rootTensor=1))
    ),
    "reduce of two": wrong(lambda group: group.reduce([ONE, ONE], ReduceOptions())),
    "reduce of sparse": wrong(lambda group: group.reduce([ROWS], ReduceOptions())),
    "broadcast of two dtypes": wrong(lambda group: group.broadcast([ONE, DOUBLE])),
    "sum of two dtypes": wrong(lambda group: group.allreduce([ONE, DOUBLE])),
    "sum of two shapes": wrong(lambda group: group.allreduce([ONE, TWO])),
    "sum of two layouts": wrong(lambda group: group.allreduce([ONE, ROWS])),
    "sum of nothing": wrong(lambda group: group.allreduce([])),
    "coalesced sum of nothing": wrong(lambda group: group.allreduce_coalesced([])),
    "coalesced sum of two dtypes": wrong(lambda group: group.allreduce_coalesced([ONE, DOUBLE])),
    "coalesced sum of sparse": wrong(lambda group: group.allreduce_coalesced([ROWS])),
    "gather of nothing": wrong(lambda group: group.allgather([], [])),
    "gather into nothing": wrong(lambda group: group.allgather([], [ONE])),
    "gather into too few": wrong(lambda group: group.allgather([[ONE]], [ONE])),
    "gather into another dtype": wrong(lambda group: group.allgather([[ONE, DOUBLE]], [ONE])),
    "gather into another shape": wrong(lambda group: group.allgather([[ONE, TWO]], [ONE])),
    "gather into one too long": wrong(lambda group: group._allgather_base(torch.zeros(3), ONE)),
    "gather into one of another dtype": wrong(
        lambda group: group._allgather_base(torch.zeros(2, dtype=torch.float64), ONE)
    ),
    "scatter of nothing": wrong(lambda group: group.reduce_scatter([], [])),
    "scatter of too few": wrong(lambda group: group.reduce_scatter([ONE], [[ONE]])),
    "scatter of one too long": wrong(lambda group: group._reduce_scatter_base(ONE, torch.zeros(3))),
    "scatter of another dtype": wrong(
        lambda group: group._reduce_scatter_base(ONE, torch.zeros(2, dtype=torch.float64))
    ),
    "coalesced scatter of too few": wrong(
        lambda group: group.reduce_scatter_tensor_coalesced([ONE, ONE], [TWO])
    ),
    "gather of no tensors": wrong(lambda group: group.gather([], [], GatherOptions())),
}


def attempt(call: Call, world: World) -> Any:
    """What a call returns, as lists, or the type of what it raises."""
    try:
        return tree_map_only(Tensor, Tensor.tolist, call(world))
    except Exception as error:
        return type(error)


def differences(store: Store, rank: int, size: int) -> list[str]:
    with joined(store, rank, size, timeout=GROUP_SECONDS):
        gloo = distributed.new_group(backend="gloo")
        ours, theirs = World(None, rank, size), World(gloo, rank, size)
        found = []
        for name, call in [*RIGHT.items(), *WRONG.items()]:
            expected, result = attempt(call, theirs), attempt(call, ours)
            if isinstance(expected, distributed.ProcessGroup):
                # torch 2.15 splits groups without a device.
                assert isinstance(result, distributed.ProcessGroup)
                continue
            if isinstance(expected, type) != (name in WRONG):
                found.append(f"{name}: Gloo has {expected}")
            if result != expected:
                found.append(f"{name}: {result}, with Gloo {expected}")
        if (sums := split(ours)) != [2.0, [None, 1.0][rank], 2.0]:
            found.append(f"parts: {sums}")
        # The wrong calls have sent nothing.
        total = torch.ones(1)
        distributed.all_reduce(total)
        return [*found, *([] if total.item() == size else ["the group is broken"])]


def test_unusual_and_wrong_calls_do_what_gloo_does() -> None:
    assert run_ranks(2, differences) == [[], []]


def expanded(store: Store, rank: int, size: int) -> list[Any]:
    # Gloo writes beyond the memory of such a tensor.
    with joined(store, rank, size, timeout=GROUP_SECONDS):
        column = (torch.ones(2, 1) + rank).expand(2, 3)
        told, first = (NUMBERS[:1] + rank).expand(4), (NUMBERS[:1] + rank).expand(4)
        distributed.all_reduce(column)
        distributed.broadcast(told, 1)
        distributed.reduce(first, 0)
        whole = torch.zeros(4 * size)
        all_gather_single(whole, (NUMBERS[:1] + rank).expand(4))
        mean = [NUMBERS + 1, NUMBERS + 3]
        options = with_fields(AllreduceOptions(), reduceOp=ReduceOp.AVG)
        low_level(World(None, rank, size)).allreduce(mean, options).wait()
        return [one.tolist() for one in (column, told, whole, *mean, *[first][rank:])]


def test_expanded_tensors_are_reduced() -> None:
    common = [[[3.0] * 3] * 2, [1.0] * 4, [0.0] * 4 + [1.0] * 4, [4.0, 6.0, 8.0], [4.0, 6.0, 8.0]]
    assert run_ranks(2, expanded) == [[*common, [1.0] * 4], common]


def wait_briefly(group: Any) -> None:
    group.allreduce([torch.ones(2)]).wait(CALL_TIMEOUT)


def set_timeout(group: Any) -> None:
    distributed.distributed_c10d._set_pg_timeout(CALL_TIMEOUT, group)
    group.allreduce([torch.ones(2)]).wait()


def monitored(group: Any) -> None:
    group.monitored_barrier(CALL_TIMEOUT, wait_all_ranks=True)


def impatient(name: str, options: Any, *args: Any) -> Callable[[Any], None]:
    def call(group: Any) -> None:
        getattr(group, name)(*args, with_fields(options(), timeout=CALL_TIMEOUT)).wait()

    return call


IMPATIENT: dict[str, Callable[[Any], None]] = {
    "wait": wait_briefly,
    "_set_pg_timeout": set_timeout,
    "monitored_barrier": monitored,
    "barrier": impatient("barrier", BarrierOptions),
    "allreduce": impatient("allreduce", AllreduceOptions, [TWO]),
    "allreduce_coalesced": impatient("allreduce_coalesced", AllreduceCoalescedOptions, [TWO]),
    "reduce": impatient("reduce", ReduceOptions, [TWO]),
    "allgather": impatient("allgather", AllgatherOptions, [[ONE, ONE]], [ONE]),
    "_reduce_scatter_base": impatient("_reduce_scatter_base", ReduceScatterOptions, ONE, TWO),
    "gather": impatient("gather", GatherOptions, [[ONE, ONE]], [ONE]),
}


def told_in_time(store: Store, rank: int, size: int) -> list[str]:
    """The calls of rank 0 that do not raise in time, or without the usual words."""
    found = []
    with joined(store, rank, size, timeout=GROUP_SECONDS):
        for name, call in IMPATIENT.items():
            for backend in ("gloo", "unisono"):
                # A group is broken after a timeout.
                group = distributed.new_group(
                    backend=backend, timeout=timedelta(seconds=GROUP_SECONDS)
                )
                if rank == 0:
                    try:
                        call(group)
                        found.append(f"{name} over {backend} returned")
                    except RuntimeError as error:
                        if not re.search("timed out|ranks? 1 failed to pass", str(error).lower()):
                            found.append(f"{name} over {backend}: {error}")
        say_to_all(PrefixStore("done", store), rank, size, "", timeout_seconds=60)
    return found


def test_timeouts_are_obeyed_and_named_as_over_gloo() -> None:
    assert run_ranks(2, told_in_time) == [[], []]


def in_detail(store: Store, rank: int, size: int) -> list[Any]:
    set_debug_level(DebugLevel.DETAIL)
    found: list[Any] = []
    with joined(store, rank, size, timeout=GROUP_SECONDS):
        for backend in ("gloo", "unisono"):
            world = World(distributed.new_group(backend=backend), rank, size)
            equal = moved(world, later=False)
            outputs = [torch.zeros(1), torch.zeros(1)]
            distributed.gather(ONE, outputs if rank == 0 else None, 0, group=world.group)
            found.append(tree_map_only(Tensor, Tensor.tolist, [equal, outputs]))
            for first, second in ((gather_one, sum_up), (gather_one, gather_two)):
                world = World(distributed.new_group(backend=backend), rank, size)
                found.append(attempt((first, second)[rank], world))
    return found


def gather_one(world: World) -> None:
    distributed.gather(ONE, [torch.zeros(1), torch.zeros(1)], 0, group=world.group)


def gather_two(world: World) -> None:
    distributed.gather(TWO, dst=0, group=world.group)


def sum_up(world: World) -> None:
    distributed.all_reduce(TWO, group=world.group)


def test_unequal_calls_are_found_in_detail() -> None:
    for theirs, *their_errors, ours, mixed, unequal in run_ranks(2, in_detail):
        assert ours == theirs
        assert all(issubclass(error, RuntimeError) for error in their_errors)
        assert mixed.__name__ == unequal.__name__ == "UnequalCollectivesError"
