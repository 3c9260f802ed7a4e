"""Training steps with and without the interpreter lock, on one free-threaded Python.

    python3.13t benchmarks/free_threaded.py --seconds 20

Processes of the same interpreter, with PYTHON_GIL=1 and with PYTHON_GIL=0, take turns of a few
steps each, so that a busy machine disturbs all alike. The *limit* is the same number of models in
threads that never meet. It has its own processes: where a process also has models that belong to no
strategy, each backward pass looks whether it reaches one of them. Ratios are those of medians.
"""

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from functools import partial
from typing import IO, Any

import torch

from unisono_tools.benchmarks.peers.in_process import Apart, Mirrored
from unisono_tools.benchmarks.peers.models import CASES

LOCKS = {"with the lock": "1", "without the lock": "0"}
WORKS: dict[str, Any] = {"unisono": partial(Mirrored, seed=0), "limit": Apart}
TURN_S = 0.05


def serve(model: str, num_replicas: int, work: str) -> None:
    """Takes a turn for every line of the standard input, and prints the seconds of a step."""
    torch.set_num_threads(num_replicas)
    with closing(WORKS[work](CASES[model], num_replicas)) as made:
        made.steps(20)
        num_steps = max(1, round(TURN_S / (_time(made.steps, 20))))
        print("ready", flush=True)
        for _ in sys.stdin:
            print(_time(made.steps, num_steps), flush=True)


def _time(steps: Any, num_steps: int) -> float:
    start = time.perf_counter()
    steps(num_steps)
    return (time.perf_counter() - start) / num_steps


def measure(model: str, num_replicas: int, seconds: float) -> dict[tuple[str, str], float]:
    """Returns the medians by lock and competitor."""
    series: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        peers: dict[tuple[str, str], tuple[IO[str], IO[str]]] = {}
        for name, work in itertools.product(LOCKS, WORKS):
            command = [sys.executable, __file__, "--serve", work, "--model", model]
            peer = subprocess.Popen(
                [*command, "--replicas", str(num_replicas)],
                env={**os.environ, "PYTHON_GIL": LOCKS[name]},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(peer)
            stack.callback(peer.kill)
            assert peer.stdin is not None
            assert peer.stdout is not None
            assert peer.stdout.readline() == "ready\n"
            peers[name, work] = peer.stdin, peer.stdout
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for key, (given, answers) in peers.items():
                print("turn", file=given, flush=True)
                series.setdefault(key, []).append(float(answers.readline()))
    return {key: statistics.median(times) for key, times in series.items()}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="MLP 256", choices=list(CASES))
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=20.0, help="the time of one row")
    parser.add_argument("--serve", choices=list(WORKS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.model, options.replicas[0], options.serve)
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
