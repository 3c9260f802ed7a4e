"""What one worker has measured counts for all: the same packs, and the same bits as untuned."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from worker_threads import communicator_of

from processes.harness import run_ranks
from processes.namespaces import enter, make_hosts
from processes.ports import free_port
from processes.test_multi_worker import worker
from unisono.communicators.communicator import Communicator
from unisono.communicators.connect import connect
from unisono.costs import Link, Tuning
from unisono.costs.tuning import this_machine_in_words
from unisono.kernels import native_core
from unisono.options import ReduceOp


def tuned_and_not(
    _: Any, rank: int, size: int, ports: list[int], files: list[str]
) -> list[tuple[int, bytes]]:
    os.environ["UNISONO_TUNING"] = files[rank]
    tuned = trained(ports[0], rank, size)
    os.environ["UNISONO_TUNING"] = "off"
    return [tuned, trained(ports[1], rank, size)]


def trained(port: int, rank: int, size: int) -> tuple[int, bytes]:
    """Trains ten parameters of 128 KiB; returns the number of packs and the weights."""
    strategy = worker(port, rank, size)
    packs = counted(communicator_of(strategy))
    torch.manual_seed(0)
    with strategy.scope():
        widths = [128, 256] * 6
        layers = [nn.Linear(widths[i], widths[i + 1], bias=False) for i in range(10)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 128)).square().mean().backward()
        optimizer.step()

    strategy.run(step)
    strategy.run(step)
    strategy.close()
    weights = torch.cat([one.detach().flatten() for one in model.parameters()])
    return len(packs) // 2, weights.numpy().tobytes()


def counted(communicator: Communicator) -> list[int]:
    """Notes the size of every sum of gradients from now on."""
    sizes: list[int] = []
    inner = communicator.all_reduce

    def all_reduce(op: ReduceOp, terms: Any, count: int | None = None) -> None:
        if op is ReduceOp.MEAN:
            sizes.append(terms[0].nbytes)
        inner(op, terms, count)

    communicator.all_reduce = all_reduce  # type: ignore[method-assign]
    return sizes


@pytest.mark.skipif(native_core().kernel is None, reason="workers of one host share no memory")
def test_the_tuning_of_rank_0_counts_for_all_workers(tmp_path: Path) -> None:
    link = Link(1e-7, 1e10)
    tuning = Tuning(link, link, link, None, None, 1e10, this_machine_in_words(), "today", "0")
    (tmp_path / "tuning.json").write_text(tuning.to_text())
    # Rank 1 has none, and would refuse to begin if it looked.
    files = [str(tmp_path / "tuning.json"), str(tmp_path / "missing.json")]

    results = run_ranks(2, tuned_and_not, [free_port(), free_port()], files)

    assert [[num_packs for num_packs, _ in found] for found in results] == [[10, 1], [10, 1]]
    assert len({weights for found in results for _, weights in found}) == 1


def between_hosts(
    _: Any, rank: int, size: int, names: list[str], tunings: list[Tuning]
) -> list[tuple[str, list[float]]]:
    enter(names[rank * len(names) // size])
    limit = timedelta(seconds=30)
    store = TCPStore("10.83.0.1", 29400, None, rank == 0, limit, wait_for_workers=False)
    found = []
    for number, tuning in enumerate(tunings):
        with connect(PrefixStore(f"{number}", store), rank, size, tuning=tuning) as communicator:
            total = torch.full([5000], 10.0**rank)
            communicator.all_reduce(ReduceOp.SUM, [total])
            communicator.all_reduce(ReduceOp.MEAN, [total])
            found.append((communicator.name, total.unique().tolist()))
            communicator.barrier()
    if rank == 0:
        # The coordinator ends last.
        time.sleep(0.5)
    return found


@pytest.mark.skipif(native_core().kernel is None, reason="workers of one host share no memory")
def test_the_way_between_hosts_is_the_faster_one_by_the_links() -> None:
    fast, slow = Link(1e-6, 1e10), Link(1e-4, 1e8)
    tunings = [
        Tuning(fast, fast, inside, fast, between, 1e10, {}, "today", "0")
        for inside, between in ((fast, slow), (slow, fast))
    ]
    with make_hosts(2) as hosts:
        results = run_ranks(4, between_hosts, hosts.names, tunings)

    by_host = "shared memory inside 2 hosts, Gloo between them"
    alike = "Gloo"
    assert results == [[(by_host, [1111.0]), (alike, [1111.0])]] * 4
