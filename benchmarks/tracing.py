"""What it costs to record a trace: training steps with and without, in turn.

    python benchmarks/tracing.py                # 20 seconds of MLP 256 on two CPU replicas

`on` is the median ratio of steps with a trace to those without one just before, so that a busy
machine disturbs both alike. `span` is what one block costs by itself, in time of the processor.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import timeit

import torch

import unisono as uo
from unisono.tracing import span
from unisono_tools.benchmarks.peers.models import CASES, train_step
from unisono_tools.benchmarks.rows import machine

NUM_REPLICAS = 2
STEPS_PER_TURN = 10
SPANS = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="time to spend (default: 20)")
    parser.add_argument("--model", default="MLP 256", choices=list(CASES), help="what is trained")
    arguments = parser.parse_args()
    torch.set_num_threads(NUM_REPLICAS)
    off, on = step_times(arguments.model, arguments.seconds)
    ratio = statistics.median(b / a for a, b in zip(off, on, strict=True))
    print(f"{arguments.model}, {NUM_REPLICAS} replicas, {machine()['cpu']}")
    print(f"step   off {statistics.median(off) * 1e3:.3f} ms   on {ratio:.4f} x   {len(off)} turns")
    print(f"span   off {span_seconds() * 1e9:.0f} ns   on {recorded_span_seconds() * 1e9:.0f} ns")


def step_times(model_name: str, budget_s: float) -> tuple[list[float], list[float]]:
    """Returns the seconds of a step, turn by turn, without and with a trace."""
    case = CASES[model_name]
    strategy = uo.MirroredStrategy([f"cpu:{i}" for i in range(NUM_REPLICAS)])
    with strategy.scope():
        model = case.make_model()
        optimizer = case.optimizer(model)
    parts = [case.batch(i) for i in range(NUM_REPLICAS)]
    batch = tuple(uo.PerReplica(part) for part in zip(*parts, strict=True))

    def turn() -> float:
        start = time.perf_counter()
        for _ in range(STEPS_PER_TURN):
            strategy.run(lambda x, y: train_step(model, optimizer, (x, y)), args=batch)
        return (time.perf_counter() - start) / STEPS_PER_TURN

    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + budget_s
    with tempfile.TemporaryDirectory() as folder:
        turn()
        while time.perf_counter() < end or not times[1]:
            times[0].append(turn())
            with uo.tracing.record(folder):
                times[1].append(turn())
    strategy.close()
    return times


def span_seconds() -> float:
    """Returns what a block costs."""

    def block() -> None:
        with span("wait", "nothing", replica=0):
            pass

    return min(timeit.repeat(block, number=SPANS, repeat=5, timer=time.thread_time)) / SPANS


def recorded_span_seconds() -> float:
    """Returns what a block costs while a trace is recorded."""
    with tempfile.TemporaryDirectory() as folder, uo.tracing.record(folder, max_events=1000):
        return span_seconds()


if __name__ == "__main__":
    main()
