"""Starts the workers of examples/elastic.py, kills some of them, and starts others.

    python examples/elastic_trouble.py FOLDER   # python examples/elastic.py --no-trouble names it

After every few steps, it kills a worker with SIGKILL, or starts one that joins the others.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import runpy
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono_tools.processes import quick_processes


class Workers:
    """The workers of a job, by number."""

    def __init__(self, folder: Path, num_first: int) -> None:
        self._folder = folder
        job = json.loads((folder / "job").read_text())
        self._command, self._addresses = job["command"], job["addresses"]
        self._num_first = num_first
        # They are forked from a process that has loaded torch, which takes seconds.
        self._forks = quick_processes("torch._dynamo", "unisono_tools.elastic_demo")
        self._processes: dict[int, Any] = {}
        for _ in range(num_first):
            self.start()

    def start(self) -> None:
        """Starts the next worker, which joins those that train already."""
        number = len(self._processes)
        # The first ones know of no others.
        known = self._addresses[: max(self._num_first, number + 1)]
        task = {"cluster": {"worker": known}, "task": {"type": "worker", "index": number}}
        words = [*self._command, "--worker", str(number)]
        process = self._forks.Process(target=run, args=(words, json.dumps(task)), daemon=True)
        process.start()
        self._processes[number] = process
        print(f"worker {number} starts", flush=True)

    def kill(self, number: int) -> None:
        """Kills one, without a warning."""
        self._processes[number].kill()
        self._processes[number].join()
        print(f"worker {number} was killed", flush=True)

    def training(self) -> list[int]:
        """Returns the workers that train now."""
        return [
            number
            for number, process in self._processes.items()
            if process.is_alive() and "step" in self._told(number)
        ]

    def num_steps(self) -> int:
        """Returns how far they have come."""
        return max((self._told(number).get("step", 0) for number in self._processes), default=0)

    def is_done(self) -> bool:
        """Returns whether one has come to the end, and no other trains."""
        return any("weights" in self._told(one) for one in self._processes) and not self.training()

    def has_room(self) -> bool:
        """Returns whether the cluster has an address for another worker."""
        return len(self._processes) < len(self._addresses)

    def check(self) -> None:
        """Raises if nobody is left who could come to the end."""
        if not any(process.is_alive() for process in self._processes.values()):
            raise SystemExit("All workers have ended before the training did. See their errors.")

    def end(self) -> None:
        """Ends those that are left: they wait for a job that has ended."""
        for process in self._processes.values():
            process.kill()
            process.join()

    def _told(self, number: int) -> dict[str, Any]:
        """The last thing that a worker has told."""
        path = self._folder / f"worker-{number}"
        # A worker that is killed may leave half a line.
        whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
        last: dict[str, Any] = json.loads(whole.rpartition("\n")[2] or "{}")
        return last


def run(words: list[str], tf_config: str) -> None:
    """Runs a script with a TF_CONFIG."""
    os.environ["TF_CONFIG"] = tf_config
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def make_trouble(options: argparse.Namespace) -> None:
    rng = random.Random(options.seed)
    workers = Workers(options.folder, options.workers)
    try:
        num_events = 0
        while not workers.is_done():
            time.sleep(0.1)
            victims = workers.training()
            is_time = workers.num_steps() >= options.every * (num_events + 1)
            if not is_time or not victims or num_events == options.events:
                if not victims and not workers.is_done():
                    workers.check()
                continue
            # In turn, so that their number stays about the same.
            if num_events % 2 == 0 and len(victims) > 1:
                workers.kill(rng.choice(victims))
            elif workers.has_room():
                workers.start()
            num_events += 1
        (options.folder / "done").touch()
    finally:
        workers.end()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=3, help="how many there are at first")
    parser.add_argument("--every", type=int, default=12, help="steps between two events")
    parser.add_argument("--events", type=int, default=-1, help="how many events there are at most")
    parser.add_argument("--seed", type=int, default=0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    make_trouble(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
