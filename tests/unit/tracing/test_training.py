"""Real training steps leave a trace that says what they did, and who was waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo
from unisono.testing import separate_memories
from unisono.tracing import Event, span, spans
from unisono.tracing.recorder import Recorder

NUM_STEPS = 3
SLEEP_S = 0.03


@contextmanager
def training(num_replicas: int) -> Iterator[Callable[..., Any]]:
    """Yields what takes one step, before whose forward pass `on_replica(id)` is called."""
    strategy = uo.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(inputs: Tensor, on_replica: Callable[[int], object]) -> Tensor:
        context = uo.get_replica_context()
        assert context is not None
        on_replica(context.replica_id_in_sync_group)
        optimizer.zero_grad()
        loss: Tensor = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    batch = (
        uo.PerReplica([torch.ones(2, 4)] * num_replicas) if num_replicas > 1 else torch.ones(2, 4)
    )
    try:
        yield lambda on_replica=lambda _: None: strategy.run(step, args=(batch, on_replica))
    finally:
        strategy.close()


def events_of(trace: uo.tracing.Trace) -> list[Event]:
    return [event for worker in trace.workers() for event in worker.events()]


@pytest.mark.parametrize("sleeper", [0, 1, 2])
def test_the_replica_that_sleeps_is_the_straggler(sleeper: int, tmp_path: Path) -> None:
    began = time.monotonic()
    slept = 0.0

    def sleep(replica: int) -> None:
        nonlocal slept
        if replica == sleeper:
            # Longer than all other waiting so far, which a busy machine may make long.
            pause = SLEEP_S + time.monotonic() - began
            time.sleep(pause)
            slept += pause

    with training(num_replicas=3) as step:
        step()
        began = time.monotonic()
        with uo.tracing.record(tmp_path) as trace:
            for _ in range(NUM_STEPS):
                step(sleep)

    summary = trace.summary()
    assert summary.num_steps == NUM_STEPS
    assert summary.straggler is not None
    assert summary.straggler.replica == sleeper
    assert summary.straggler.waited > 0
    assert summary.replicas[sleeper].compute >= slept * 1e9
    assert all(shares.waiting > 0 for i, shares in summary.replicas.items() if i != sleeper)
    assert f"replica {sleeper} on worker 0" in str(summary)


def test_the_shares_of_every_replica_add_up_to_the_steps(tmp_path: Path) -> None:
    with training(num_replicas=2) as step, uo.tracing.record(tmp_path) as trace:
        for _ in range(NUM_STEPS):
            step()

    steps = sum(event.duration for event in events_of(trace) if event.category == "step")
    for shares in trace.summary().replicas.values():
        assert shares.total == pytest.approx(steps, rel=1e-6)
        assert min(shares.compute, shares.communication) > 0


def test_replicas_packs_waits_copies_and_input_are_recorded(tmp_path: Path) -> None:
    with separate_memories(), training(num_replicas=2) as step:
        strategy = uo.MirroredStrategy(["cpu:0", "cpu:1"])
        loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4)
        with uo.tracing.record(tmp_path) as trace:
            for _ in strategy.experimental_distribute_dataset(loader):
                step()
        strategy.close()

    events = events_of(trace)
    kinds = {event.category for event in events}
    # Not every system can measure how long replicas wait for the interpreter.
    kinds.discard("interpreter")
    assert kinds == {"step", "replica", "merge", "wait", "reduce", "copy", "input"}
    assert {event.name for event in events if event.category == "input"} == {
        "next",
        "fetch",
        "place",
    }
    packs = [event for event in events if event.name == "pack"]
    assert [pack.arguments["bytes"] for pack in packs] == [4 * (4 * 8 + 8 + 8 + 1)] * 2
    copies = [event.arguments["bytes"] for event in events if event.name == "copy"]
    assert copies
    assert min(copies) > 0
    assert trace.summary().total.input > 0
    steps = [event.arguments["step"] for event in events if event.category == "step"]
    assert steps == [1, 2]


def test_a_block_of_the_program_counts_as_computation(tmp_path: Path) -> None:
    def augment(replica: int) -> None:
        with span("compute", "augment", replica=replica):
            time.sleep(SLEEP_S)

    with training(num_replicas=2) as step, uo.tracing.record(tmp_path) as trace:
        step(augment)

    own = [event for event in events_of(trace) if event.name == "augment"]
    assert sorted(event.arguments["replica"] for event in own) == [0, 1]
    for shares in trace.summary().replicas.values():
        assert shares.compute > SLEEP_S * 1e9


def test_one_device_leaves_a_trace_too(tmp_path: Path) -> None:
    strategy = uo.OneDeviceStrategy("cpu:0")
    with uo.tracing.record(tmp_path) as trace:
        strategy.run(lambda: torch.ones(3) + 1)

    summary = trace.summary()
    assert list(summary.replicas) == [0]
    assert summary.straggler is None
    assert "nobody waited" in str(summary)


def test_nothing_is_recorded_when_off() -> None:
    recorder = Recorder(time.perf_counter_ns, 1000)
    with training(num_replicas=2) as step:
        spans.start(recorder)
        step()
        spans.stop()
        counts = [lane.count for lane in recorder.lanes]
        step()

    assert len(counts) == 2
    assert all(count >= 3 for count in counts)
    assert [lane.count for lane in recorder.lanes] == counts
    assert span("step", "one") is span("wait", "another", replica=1)


def test_a_step_that_fails_is_in_the_file(tmp_path: Path) -> None:
    def fail(replica: int) -> None:
        if replica == 1:
            raise ZeroDivisionError("on purpose")

    with training(num_replicas=2) as step:
        with (
            pytest.raises(ZeroDivisionError, match="on purpose"),
            uo.tracing.record(tmp_path) as trace,
        ):
            step()
            step(fail)
        step()

    events = events_of(trace)
    failed = [event for event in events if "error" in event.arguments]
    assert {event.category for event in failed} >= {"step", "replica"}
    assert {e.arguments["error"] for e in failed if e.category == "step"} == {"ZeroDivisionError"}
    assert trace.summary().num_steps == 2


def test_the_oldest_events_make_room_and_are_counted(tmp_path: Path) -> None:
    with training(num_replicas=2) as step, uo.tracing.record(tmp_path, max_events=30) as trace:
        for _ in range(20):
            step()

    (worker,) = trace.workers()
    assert all(15 <= len(thread.events) <= 30 for thread in worker.threads)
    assert worker.num_dropped > 0
    summary = trace.summary()
    assert 0 < summary.num_steps < 20
    assert f"{worker.num_dropped} early events were dropped" in str(summary)
