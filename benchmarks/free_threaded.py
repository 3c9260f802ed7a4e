"""Training steps with and without the interpreter lock, on one free-threaded Python.

    python3.13t benchmarks/free_threaded.py --seconds 20

Two processes of the same interpreter, one with PYTHON_GIL=1 and one with PYTHON_GIL=0, take turns
of a few steps each, so that a busy machine disturbs both alike. The *limit* is the same number of
models in threads that never meet. Ratios are those of medians.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from typing import IO

import torch

from unisono_tools.benchmarks.peers.in_process import Apart, Mirrored
from unisono_tools.benchmarks.peers.models import CASES

LOCKS = {"with the lock": "1", "without the lock": "0"}
TURN_S = 0.05


def serve(model: str, num_replicas: int) -> None:
    """Takes a turn for every line of the standard input, and prints the seconds of a step."""
    torch.set_num_threads(num_replicas)
    case = CASES[model]
    with (
        closing(Mirrored(case, num_replicas, seed=0)) as mirrored,
        closing(Apart(case, num_replicas)) as apart,
    ):
        works = {"unisono": mirrored.steps, "limit": apart.steps}
        for steps in works.values():
            steps(20)
        num_steps = max(1, round(TURN_S / (_time(mirrored.steps, 20))))
        print("ready", flush=True)
        for line in sys.stdin:
            print(_time(works[line.strip()], num_steps), flush=True)


def _time(steps: object, num_steps: int) -> float:
    start = time.perf_counter()
    steps(num_steps)  # type: ignore[operator]
    return (time.perf_counter() - start) / num_steps


def measure(model: str, num_replicas: int, seconds: float) -> dict[tuple[str, str], float]:
    """Returns the medians by lock and competitor."""
    series: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        peers: dict[str, tuple[IO[str], IO[str]]] = {}
        for name, setting in LOCKS.items():
            command = [sys.executable, __file__, "--serve", str(num_replicas), "--model", model]
            peer = subprocess.Popen(
                command,
                env={**os.environ, "PYTHON_GIL": setting},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(peer)
            stack.callback(peer.kill)
            assert peer.stdin is not None
            assert peer.stdout is not None
            assert peer.stdout.readline() == "ready\n"
            peers[name] = peer.stdin, peer.stdout
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for name, (given, answers) in peers.items():
                for work in ("unisono", "limit"):
                    print(work, file=given, flush=True)
                    series.setdefault((name, work), []).append(float(answers.readline()))
    return {key: statistics.median(times) for key, times in series.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="MLP 256", choices=list(CASES))
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=20.0, help="the time of one row")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.model, options.serve)
        return
    print("| replicas | with the lock | of the limit | without | of the limit | with/without |")
    print("|---|---|---|---|---|---|")
    for num_replicas in options.replicas:
        found = measure(options.model, num_replicas, options.seconds)
        columns = []
        for name in LOCKS:
            own, limit = found[name, "unisono"], found[name, "limit"]
            columns += [f"{own * 1000:.2f} ms", f"{limit / own:.2f}"]
        first, second = (found[name, "unisono"] for name in LOCKS)
        print(f"| {num_replicas} | {' | '.join(columns)} | {first / second:.2f} |", flush=True)


if __name__ == "__main__":
    main()
