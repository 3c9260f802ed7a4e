"""Traces of real workers: merged, on one clock, with the slow worker named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trace_events import by_thread, check_trace_events

import unisono as uo
from processes.harness import run_ranks
from processes.ports import free_port
from processes.test_multi_worker import cluster
from unisono.cluster_resolver import SimpleClusterResolver
from unisono.experimental import CommunicationImplementation
from unisono.tracing import Trace, read_folder

NUM_STEPS = 5
# Much longer than a busy machine keeps another replica waiting.
SLEEP_S = 0.2
AHEAD_NS = 3600 * 10**9


def train(strategy: uo.Strategy, slow_replica: int, num_steps: int) -> None:
    """Takes steps whose packs are small, so that some travel while backward still runs."""
    with strategy.scope():
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> Tensor:
        context = uo.get_replica_context()
        assert context is not None
        if context.replica_id_in_sync_group == slow_replica:
            time.sleep(SLEEP_S)
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(2, 32)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(num_steps):
        strategy.run(step)


def _traced_worker(
    _: Any, rank: int, size: int, port: int, folder: str, slow_replica: int, options: Any
) -> None:
    resolver = SimpleClusterResolver(cluster(port, size), task_type="worker", task_id=rank)
    strategy = uo.MultiWorkerMirroredStrategy(resolver, options, devices=["cpu:0", "cpu:1"])

    def clock() -> int:
        # The clock of the second worker is an hour ahead, and a ten thousandth too fast.
        now = time.perf_counter_ns()
        return now + AHEAD_NS + now // 10_000 if rank == 1 else now

    train(strategy, slow_replica=-1, num_steps=1)
    with uo.tracing.record(folder, clock=clock):
        train(strategy, slow_replica, NUM_STEPS)
    strategy.close()


@pytest.mark.parametrize(("implementation", "slow_replica"), [("AUTO", 3), ("RING", 0)])
def test_the_slow_replica_of_another_worker_is_named_whatever_its_clock(
    slow_replica: int, implementation: str, tmp_path: Path
) -> None:
    options = uo.experimental.CommunicationOptions(
        bytes_per_pack=4096,
        timeout_seconds=30,
        implementation=CommunicationImplementation[implementation],
    )
    run_ranks(2, _traced_worker, free_port(), str(tmp_path), slow_replica, options)

    trace = Trace(tmp_path)
    summary = trace.summary()
    assert summary.num_workers == 2
    assert summary.num_steps == NUM_STEPS
    assert sorted(summary.replicas) == [0, 1, 2, 3]
    assert summary.straggler is not None
    assert (summary.straggler.worker, summary.straggler.replica) == (
        slow_replica // 2,
        slow_replica,
    )
    slept = NUM_STEPS * SLEEP_S * 1e9
    others = [shares for i, shares in summary.replicas.items() if i != slow_replica]
    assert all(shares.waiting > slept / 4 for shares in others)
    assert summary.replicas[slow_replica].compute > slept
    apart = [next(one.events()).start for one in read_folder(tmp_path)]
    assert apart[1] - apart[0] > AHEAD_NS / 2
    check_workers(trace.timeline())


def check_workers(drawn: dict[str, Any]) -> None:
    """Both workers' steps lie beside each other, and packs have arrows to their exchange."""
    check_trace_events(drawn)
    events = drawn["traceEvents"]
    steps = {
        rank: [e for e in events if e.get("cat") == "step" and e["pid"] == rank] for rank in (0, 1)
    }
    assert len(steps[0]) == len(steps[1]) == NUM_STEPS
    for pair in zip(steps[0], steps[1], strict=True):
        # No worker ends a step before the other has begun it. Their clocks are set by messages.
        assert max(e["ts"] for e in pair) < min(e["ts"] + e["dur"] for e in pair) + 1e6
    assert {event["pid"] for event in events if event["ph"] == "s"} == {0, 1}
    exchanged = {e["tid"] for spans in by_thread(events).values() for e in spans}
    assert len(exchanged) == 3


def test_an_environment_variable_records_every_worker_of_a_launch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import time
            import unisono as uo

            strategy = uo.MultiWorkerMirroredStrategy()
            for _ in range(3):
                strategy.run(lambda: uo.get_replica_context().all_reduce("sum", 1.0))
            """
        )
    )
    folder = tmp_path / "trace"
    environment = {**os.environ, "UNISONO_TRACE": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "unisono", "launch", "-n", "2", str(script)]
    # They look at the variable when they import Unisono, so nothing is forked.
    subprocess.run(command, env=environment, check=True, timeout=200)

    # The launcher, which has the variable too, has written nothing.
    assert [worker.rank for worker in read_folder(folder)] == [0, 1]
    summary = Trace(folder).summary()
    assert summary.num_steps == 3
    assert summary.missing == []
    assert json.loads(json.dumps(summary.as_dict()))["num_workers"] == 2
