"""Groups of the torch.distributed backend: their sums, parts, failures and end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from processes.backend_cases import joined, reduce_scatter_single
from processes.harness import outcome, run_ranks
from processes.leftovers import Holdings, settled
from processes.programs import clean_environment, run_together
from unisono.communicators.stores import say_to_all
from unisono.kernels import tree_reduce
from unisono.options import ReduceOp
from unisono_tools.processes import free_ports

pytestmark = pytest.mark.backend

# Enough for ranks of a busy machine to come at the same time.
LATE_SECONDS = 12.0


def terms(size: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1001, generator=generator).to(dtype) for _ in range(size)]


def sums_of_the_tree(store: Store, rank: int, size: int) -> list[bool]:
    with joined(store, rank, size):
        return [
            check
            for dtype in (torch.float32, torch.bfloat16, torch.float64)
            for check in _sums_match(terms(size, dtype), rank)
        ]


def _sums_match(brought: list[Tensor], rank: int) -> list[bool]:
    summed, mean = brought[rank].clone(), brought[rank].clone()
    distributed.all_reduce(summed)
    distributed.all_reduce(mean, distributed.ReduceOp.AVG)
    everybody = list(range(len(brought)))
    by_functions = functional.all_reduce(brought[rank], "sum", everybody)
    return [
        torch.equal(summed, tree_reduce(ReduceOp.SUM, brought)),
        torch.equal(mean, tree_reduce(ReduceOp.MEAN, brought)),
        torch.equal(by_functions, summed),
    ]


@pytest.mark.parametrize("size", [2, 3])
def test_sums_have_the_bits_of_the_tree(size: int) -> None:
    assert run_ranks(size, sums_of_the_tree) == [[True] * 9] * size


def means_of_integers(store: Store, rank: int, size: int) -> list[list[int]]:
    """Each collective that can take a mean, twice for each dtype."""
    mean = distributed.ReduceOp.AVG
    found = []
    with joined(store, rank, size):
        for dtype in (torch.int8, torch.int16, torch.int32, torch.int64) * 2:
            own = torch.tensor([rank, 7 - rank, -9 + rank], dtype=dtype)
            everywhere, at_first = own.clone(), own.clone()
            distributed.all_reduce(everywhere, mean)
            distributed.reduce(at_first, 0, mean)
            parts = [torch.empty_like(own) for _ in range(2)]
            reduce_scatter_single(parts[0], own.repeat(size), op=mean)
            distributed.reduce_scatter(parts[1], [own] * size, op=mean)
            firsts = [at_first] if rank == 0 else []
            found += [one.tolist() for one in (everywhere, *firsts, *parts)]
    return found


def test_a_mean_of_integers_drops_its_fraction() -> None:
    # Lightning takes means of counts, where the backend is not called "gloo".
    for rank, found in enumerate(run_ranks(2, means_of_integers)):
        assert found == [[0, 6, -8]] * (8 * (4 if rank == 0 else 3))


def talk_in_parts(store: Store, rank: int, size: int) -> dict[str, Any]:
    with joined(store, rank, size):
        pair = distributed.new_group([0, 2])
        mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("rows", "columns"))
        told: dict[str, Any] = {"backend": distributed.get_backend(), "name": mesh.device_type}
        number = torch.tensor([float(rank)])
        if rank != 1:
            distributed.all_reduce(number, group=pair)
        told["pair"] = number.item()
        rows = torch.ones(2)
        distributed.all_reduce(rows, group=mesh.get_group("rows"))
        told["rows"] = rows.tolist()
        objects: list[Any] = [None] * size
        distributed.all_gather_object(objects, {"rank": rank})
        told["objects"] = [one["rank"] for one in objects]
        if rank != 2:
            message = torch.tensor([7.0 * (1 - rank)])
            (distributed.send if rank == 0 else distributed.recv)(message, 1 - rank)
            told["message"] = message.item()
        distributed.destroy_process_group(pair)
        return told


def test_parts_of_the_ranks_talk_among_themselves() -> None:
    first, second, third = run_ranks(3, talk_in_parts)

    assert first["backend"] == "unisono"
    assert [one["pair"] for one in (first, second, third)] == [2.0, 1.0, 2.0]
    assert [one["rows"] for one in (first, second, third)] == [[3.0, 3.0]] * 3
    assert [one["objects"] for one in (first, second, third)] == [[0, 1, 2]] * 3
    assert (first["message"], second["message"]) == (7.0, 7.0)


def unequal_shapes(store: Store, rank: int, size: int) -> Any:
    with joined(store, rank, size):
        return outcome(lambda: distributed.all_reduce(torch.ones(3 if rank == 1 else 2)))


def test_a_rank_that_calls_something_else_is_named_on_all_ranks() -> None:
    outcomes = run_ranks(3, unequal_shapes)

    assert {kind for kind, _, _, _ in outcomes} == {"UnequalCollectivesError"}
    assert all("rank 1 makes all_reduce(sum) of float32[3]" in text for _, text, _, _ in outcomes)


def one_is_late(store: Store, rank: int, size: int) -> Any:
    with together(store, rank, size):
        if rank == size - 1:
            return None
        work = distributed.all_reduce(torch.ones(2), async_op=True)
        with pytest.raises(TimeoutError, match="allreduce timed out"):
            work.wait(timedelta(milliseconds=50))
        found = outcome(work.wait)
        assert isinstance(work.exception(), distributed.DistBackendError)
        assert not work.is_success()
        return found


def test_a_rank_that_does_not_come_is_named() -> None:
    *outcomes, late = run_ranks(3, one_is_late)

    assert late is None
    for kind, message, ranks, seconds in outcomes:
        assert (kind, ranks) == ("WorkerTimeoutError", (2,))
        assert "rank 2" in message
        assert seconds < LATE_SECONDS + 50


def left_alone_in_backward(store: Store, rank: int, size: int) -> str | None:
    with together(store, rank, size):
        model = DistributedDataParallel(nn.Linear(2, 2))
        loss = model(torch.ones(1, 2)).sum()
        if rank == 1:
            return None
        with pytest.raises(RuntimeError) as raised:
            loss.backward()
        return str(raised.value)


def test_backward_ends_with_an_error_that_names_the_rank_that_does_not_come() -> None:
    message, _ = run_ranks(2, left_alone_in_backward)

    assert "WorkerTimeoutError" in message
    assert "rank 1" in message


@contextmanager
def together(store: Store, rank: int, size: int) -> Iterator[None]:
    """A group with little patience, whose ranks come at the same time and stay to the end."""
    say_to_all(PrefixStore("ready", store), rank, size, "", timeout_seconds=60)
    with joined(store, rank, size, timeout=LATE_SECONDS):
        yield
        say_to_all(PrefixStore("done", store), rank, size, "", timeout_seconds=60)


def come_and_go(store: Store, rank: int, size: int) -> list[Holdings]:
    """Makes groups over one store, again and again, and returns what is held after each."""
    held: list[Holdings] = []
    for _ in range(3):
        with joined(store, rank, size):
            part = distributed.new_group(list(range(size)))
            for group in (part, None):
                works = [distributed.all_reduce(torch.ones(9), group=group, async_op=True)]
                distributed.all_reduce(torch.ones(9), group=group)
                distributed.all_to_all_single(torch.empty(size), torch.ones(size), group=group)
                assert all(work.wait() for work in works)
            del part, group, works
        held.append(settled(held[0]) if held else Holdings.now())
    return held


def test_nothing_is_left_when_groups_end() -> None:
    for first, *later in run_ranks(2, come_and_go):
        assert all(one.is_within(first) for one in later), (first, later)


PROGRAM = """
import sys
import torch
from torch import distributed

assert "unisono" not in sys.modules
distributed.init_process_group("cpu:unisono")
total = torch.tensor([distributed.get_rank() + 1.0])
distributed.all_reduce(total)
print(distributed.get_backend_config(), total.item(), "unisono" in sys.modules)
distributed.destroy_process_group()
"""


def test_a_program_need_not_import_unisono(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0]), "WORLD_SIZE": "2"}
    environs = [clean_environment(**place, RANK=str(rank)) for rank in range(2)]

    for status, output, errors in run_together([sys.executable, script], environs):
        assert (status, output) == (0, "cpu:unisono 3.0 True\n"), errors
