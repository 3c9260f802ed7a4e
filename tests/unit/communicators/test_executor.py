"""Every algorithm between ranks, run as the cost model prices it, has the bits of the tree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes.harness import run_ranks
from torch import Tensor
from torch._C._distributed_c10d import Store

from unisono.algorithms.rounds import doubling, exchange, one_step, turns_of
from unisono.communicators.executor import Executor, pieces_of
from unisono.communicators.headers import HEADER_BYTES, Header
from unisono.communicators.network import NetworkCommunicator
from unisono.communicators.plan import Plan
from unisono.costs import USUAL_LINK, Cluster
from unisono.errors import UnequalCollectivesError
from unisono.kernels import combine_into, tree_reduce
from unisono.options import ReduceOp
from unisono_tools.pricing import Phase, busiest_share, running
from unisono_tools.pricing.halving import halving
from unisono_tools.pricing.ring import ring
from unisono_tools.pricing.rounds import loads_of
from unisono_tools.pricing.tree import tree

ALGORITHMS = (ring, tree, doubling, halving, exchange, one_step)
MEAN, PROD, SUM = ReduceOp.MEAN, ReduceOp.PROD, ReduceOp.SUM
# Five ranks are no branch of the tree, and parts of 1003 are odd.
LENGTH = 1003


def brought_by(rank: int, num_terms: int, dtype: torch.dtype) -> list[Tensor]:
    numbers = torch.arange(LENGTH * num_terms, dtype=torch.float64).add_(rank).sin_()
    return [one.clone() for one in numbers.to(dtype).view(num_terms, LENGTH)]


def wrong(store: Store, rank: int, size: int) -> list[str]:
    """Returns what went wrong: one line for each reduction that has other bits than the tree."""
    found = []
    with NetworkCommunicator(store, rank, size, backend="tcp", timeout_seconds=60) as communicator:
        number = 0
        for algorithm in ALGORITHMS:
            for op, num_terms, dtype in [(SUM, 1, torch.float32), (MEAN, 2, torch.float16)]:
                every = [brought_by(one, num_terms, dtype) for one in range(size)]
                expected = tree_reduce(op, [term for terms in every for term in terms])
                executor = Executor(algorithm(size), rank, num_terms)
                number += 1
                header = Header.of_terms("all_reduce", number, op, every[rank], None)
                with communicator._link.collective(header) as collective:
                    (total,) = executor.run(collective, op, pieces_of(every[rank], size))
                if not torch.equal(total, expected):
                    found.append(f"{algorithm.__name__} {op} {num_terms} {dtype}")
        communicator.barrier()
    return found


def test_every_algorithm_has_the_bits_of_the_tree() -> None:
    assert run_ranks(5, wrong) == [[]] * 5


def wrong_plans(store: Store, rank: int, size: int) -> list[str]:
    """Returns what went wrong in small reductions whose messages are prepared once."""
    found = []
    with NetworkCommunicator(store, rank, size, backend="tcp", timeout_seconds=60) as communicator:
        link = communicator._link
        for algorithm in ALGORITHMS:
            for op, num_terms, dtype in [(SUM, 1, torch.float32), (MEAN, 2, torch.float16)]:
                executor = Executor(algorithm(size), rank, num_terms)
                plan = Plan(executor, link, op, (dtype, LENGTH, num_terms), 7)
                assert plan.is_small
                for turn in range(3):
                    every = [brought_by(one + turn, num_terms, dtype) for one in range(size)]
                    terms = [term for terms in every for term in terms]
                    expected = torch.empty_like(terms[0])
                    combine_into(op, terms, [expected], 7)
                    header = Header.of_terms("all_reduce", link.sequence + 1, op, every[rank], 7)
                    with link.collective(header) as collective:
                        plan.run(collective, every[rank])
                    if not torch.equal(every[rank][0], expected):
                        found.append(f"{algorithm.__name__} {op} {num_terms} {dtype} {turn}")
        try:
            communicator.all_reduce(SUM, [torch.ones(3 if rank == 1 else 4)])
            found.append("no error")
        except UnequalCollectivesError as error:
            found += [] if error.ranks == (1,) else [str(error)]
    return found


def test_a_plan_gives_the_bits_of_the_tree_again_and_again() -> None:
    assert run_ranks(5, wrong_plans) == [[]] * 5
    assert run_ranks(4, wrong_plans) == [[]] * 4


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 13, 16])
def test_ranks_send_what_is_priced(num_ranks: int) -> None:
    for algorithm in (exchange, one_step, doubling, halving):
        rounds = algorithm(num_ranks)
        if algorithm is halving and num_ranks & (num_ranks - 1):
            continue
        sent = [
            sum(1 / rounds.num_parts for turn in turns_of(rounds, rank) for _ in turn.sends)
            for rank in range(num_ranks)
        ]
        priced = busiest_share((Phase(rounds),), 1, between=True)
        # Ranks that are no power of two send up to as much as is priced.
        assert max(sent) <= priced + 1e-9
        if num_ranks & (num_ranks - 1) == 0:
            assert sent == pytest.approx([priced] * num_ranks)


def sent_by(store: Store, rank: int, size: int) -> list[tuple[int, int]]:
    """The messages and bytes that a rank really sends in an all-reduce, by size of the tensor."""
    found = []
    with NetworkCommunicator(store, rank, size, backend="tcp", timeout_seconds=60) as communicator:
        transport: Any = communicator._link.transport
        sent: list[int] = []
        send = transport.send

        def counted(peer: int, data: Tensor) -> Any:
            sent.append(len(data))
            return send(peer, data)

        transport.send = counted
        for num_bytes in SIZES:
            sent.clear()
            communicator.all_reduce(SUM, [torch.ones(num_bytes // 4)])
            found.append((len(sent), sum(sent)))
        communicator.barrier()
    return found


SIZES = (64, 240 << 10)


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_what_is_planned_is_what_runs(num_ranks: int) -> None:
    cluster = Cluster(num_ranks, 1, USUAL_LINK, USUAL_LINK, 1e10)

    for of_rank in run_ranks(num_ranks, sent_by):
        for num_bytes, (messages, sent) in zip(SIZES, of_rank, strict=True):
            loads = loads_of(running(cluster, num_bytes)[1], 1)
            assert messages == sum(load.between_messages for load in loads)
            # Each rank hears one header from each other one, besides the data.
            headers = (num_ranks - 1) * HEADER_BYTES
            assert sent - headers == pytest.approx(
                num_bytes * sum(load.between_share for load in loads)
            )


@pytest.mark.parametrize("num_ranks", [13, 16, 32])
def test_messages_of_small_tensors_grow_with_the_logarithm_of_the_ranks(num_ranks: int) -> None:
    levels = (num_ranks - 1).bit_length()
    for root in (None, 0, num_ranks - 1):
        for rank in (0, 1, num_ranks - 1):
            turns = turns_of(doubling(num_ranks), rank, root=root)
            assert sum(len(turn.peers[0]) for turn in turns) == levels
