"""A preempted worker of an elastic job is cut off as the others learn that it leaves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import unisono as uo
from processes.crew import Crew, Desk
from processes.namespaces import enter, make_hosts
from unisono.checkpoints.agreement import Notice
from unisono.errors import CommunicationError, WorkerTimeoutError
from unisono.workers import ConnectedWorkers
from unisono.workers.elastic.leaving import READY_ALONE

pytestmark = pytest.mark.timeout(200)
SECONDS = 10.0


def train(desk: Desk, rank: int, addresses: list[str], namespace: str, folder: Path) -> str:
    """Trains until this worker leaves, or may not go on. Rank 0 is preempted."""
    enter(namespace)
    resolver = uo.cluster_resolver.SimpleClusterResolver(
        {"worker": addresses}, task_type="worker", task_id=rank
    )
    options = uo.experimental.CommunicationOptions(timeout_seconds=SECONDS)
    strategy = uo.MultiWorkerMirroredStrategy(resolver, options, num_replicas=2, elastic=True)
    batches = strategy.experimental_distribute_dataset([torch.ones(2, 1)] * 1000)
    checkpoint = uo.experimental.Checkpoint(input=batches)
    handler = uo.experimental.PreemptionCheckpointHandler(resolver, checkpoint, folder)
    job, deadline = strategy.extended.elastic, time.monotonic() + 100
    assert job is not None
    with closing(strategy), closing(handler):
        try:
            for x in batches:
                if rank == 0 and handler.total_run_calls == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                handler.run(lambda x: strategy.run(torch.sum, args=(x,)), x)
                time.sleep(0.1)
                if len(job.members.met.members) == 1:
                    return "goes on"
                assert time.monotonic() < deadline
        except CommunicationError as error:
            return str(error)
        except SystemExit as left:
            return f"leaves with {left.code}"
    return "has come to the end"


def train_unheard(desk: Desk, *task: Any) -> str:
    """Does the same, and loses what the other worker sends as it learns that this one leaves."""
    sign, gather = Notice.sign, ConnectedWorkers.gather
    signs: list[int] = []

    def noted(notice: Notice) -> int:
        signs.append(sign(notice))
        return signs[-1]

    def lost(workers: ConnectedWorkers, tensor: torch.Tensor) -> list[torch.Tensor]:
        rows = gather(workers, tensor)
        if signs[-1:] == [READY_ALONE] and workers.are_many:
            desk.tell("cut")
            desk.store.wait(["is cut"], timedelta(seconds=60))
            raise WorkerTimeoutError("nothing came", [1])
        return rows

    with patch.object(Notice, "sign", noted), patch.object(ConnectedWorkers, "gather", lost):
        return train(desk, *task)


def test_only_one_goes_on_if_a_preempted_worker_does_not_hear_that_it_leaves(
    tmp_path: Path,
) -> None:
    with make_hosts(2) as hosts, Crew(2) as crew:
        addresses = [f"{hosts.address(host)}:4000" for host in range(2)]
        for rank, name in enumerate(hosts.names):
            work: Callable[..., str] = train if rank else train_unheard
            crew.members[rank].begin(work, rank, addresses, name, tmp_path)
        assert crew.members[0].hear(60) == "cut"
        hosts.cut(0)
        crew.store.set("is cut", "")
        first, second = (member.hear(100) for member in crew.members)
    # Half of the workers with the lowest number is enough. It saves and leaves.
    assert first == "leaves with 0"
    assert "cut in two" in second
