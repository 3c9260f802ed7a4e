"""Training steps on two CPU replicas, in one process and in two, against DDP and TensorFlow.

    python benchmarks/training_step.py                      # everything, about two minutes
    python benchmarks/training_step.py --quick              # two models, for a look
    python benchmarks/training_step.py --tensorflow /path/to/python-with-tensorflow

All competitors take turns of a few steps each until the time is up, so that a busy machine disturbs
them alike. Numbers are medians, and columns other than `unisono` are ratios: how many times the
time of `unisono`, one process under `MirroredStrategy`, the competitor needs.

workers     MultiWorkerMirroredStrategy, one process a replica, all on one host
DDP         DistributedDataParallel over Gloo, one process a replica
DDP uo      the same program over the backend "unisono"
TF graph    TensorFlow's MirroredStrategy on two logical CPUs, the step a tf.function
limit       two copies of the model and its optimizer in two threads that never meet: 1.0 means that
            communication costs nothing, less than 1.0 what is left to win

The last two columns are DDP over Gloo against workers and against DDP over "unisono", which have as
many processes.

Every replica has one thread and half of the batch, and the batch is there already; TensorFlow
chooses its threads itself, unless TF_NUM_INTRAOP_THREADS is set. `nn.DataParallel` does not take
part: on CPU it uses no second replica. Before a model is measured, the losses of its first steps
with `unisono`, with workers and with DDP are compared, and the run ends if they differ.
"""

from __future__ import annotations

import argparse
import json
import math
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from harness import Work, interleaved_medians, machine, write_json
from peers.ddp import Ddp
from peers.models import CASES, Case, train_step
from peers.trainers import Trainers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from workers import Workers

import unisono as uo
from unisono.kernels import native_core

NUM_REPLICAS = 2
SEED = 0
NUM_COMPARED = 5
DEADLINE_S = 120.0
# Long enough that starting a turn, such as the message to DDP's processes, does not count.
TURN_S = 0.03


class Unisono:
    """A case under `MirroredStrategy`."""

    def __init__(self, case: Case) -> None:
        self._strategy = uo.MirroredStrategy([f"cpu:{i}" for i in range(NUM_REPLICAS)])
        torch.manual_seed(SEED)
        with self._strategy.scope():
            model = case.make_model()
            optimizer = case.optimizer(model)
        batches = [case.batch(i) for i in range(NUM_REPLICAS)]
        self._batch = tuple(uo.PerReplica(parts) for parts in zip(*batches, strict=True))
        self._step: Callable[..., Tensor] = lambda inputs, labels: train_step(
            model, optimizer, (inputs, labels)
        )

    def losses(self, num_steps: int) -> list[float]:
        """Takes steps, and returns the mean loss of the replicas at each."""
        strategy = self._strategy
        return [
            float(strategy.reduce(uo.ReduceOp.MEAN, strategy.run(self._step, args=self._batch)))
            for _ in range(num_steps)
        ]

    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._strategy.run(self._step, args=self._batch)

    def close(self) -> None:
        self._strategy.close()


class Apart:
    """Copies of the model in threads of their own, which never meet."""

    def __init__(self, case: Case) -> None:
        self._threads = ThreadPoolExecutor(
            NUM_REPLICAS, initializer=torch.set_num_threads, initargs=(1,)
        )
        models = [case.make_model() for _ in range(NUM_REPLICAS)]
        self._copies = [
            (model, case.optimizer(model), case.batch(i)) for i, model in enumerate(models)
        ]

    def steps(self, num_steps: int) -> None:
        def work(copy: Any) -> None:
            # As on a replica: backward runs on this thread.
            with torch.autograd.set_multithreading_enabled(False):
                for _ in range(num_steps):
                    train_step(*copy)

        list(self._threads.map(work, self._copies, timeout=DEADLINE_S))

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)


class TensorFlow:
    """TensorFlow in an interpreter of its own."""

    def __init__(self, interpreter: str) -> None:
        script = Path(__file__).parent / "peers" / "tensorflow_training.py"
        self._process = subprocess.Popen(
            [interpreter, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def prepare(self, name: str, case: Case) -> None:
        self._ask({"case": name, "batch_size": case.batch_size})

    def steps(self, num_steps: int) -> None:
        self._ask({"steps": num_steps})

    def _ask(self, request: dict[str, Any]) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        print(json.dumps(request), file=stdin, flush=True)
        ready, _, _ = select.select([stdout], [], [], DEADLINE_S)
        answer = stdout.readline() if ready else ""
        if not answer or not math.isfinite(json.loads(answer)["loss"]):
            raise RuntimeError(f"TensorFlow answered {answer!r} to {request}.")

    def close(self) -> None:
        try:
            self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate(timeout=10)


def measure(
    name: str, budget_s: float, crews: dict[str, Trainers], peer: TensorFlow | None
) -> dict[str, Any]:
    """Measures one row of the table."""
    case = CASES[name]
    with closing(Unisono(case)) as unisono, closing(Apart(case)) as apart:
        losses = unisono.losses(NUM_COMPARED)
        takers = {"unisono": unisono.steps}
        for other, crew in crews.items():
            check_losses(name, losses, other, crew.prepare(name, SEED, NUM_COMPARED))
            takers[other] = crew.steps
        takers["limit"] = apart.steps
        if peer is not None:
            peer.prepare(name, case)
            takers["TF graph"] = peer.steps
        num_steps = steps_per_turn(unisono.steps)
        works: dict[str, Work] = {
            taker: lambda steps=steps: steps(num_steps)  # type: ignore[misc]
            for taker, steps in takers.items()
        }
        medians = interleaved_medians(works, budget_s=budget_s)
    own = medians["unisono"]
    return {
        "model": name,
        "batch": case.batch_size,
        "parameters": sum(parameter.numel() for parameter in case.make_model().parameters()),
        "unisono_ms": own / num_steps * 1e3,
        "ratios": {taker: time / own for taker, time in medians.items() if taker != "unisono"},
    }


def check_losses(name: str, own: list[float], other: str, others: list[float]) -> None:
    """Ends the run if the first steps of the two differ by more than float32 may."""
    if any(not math.isclose(a, b, rel_tol=1e-4) for a, b in zip(own, others, strict=True)):
        raise SystemExit(f"{name}: the losses of unisono are {own}, those of {other} {others}.")


def steps_per_turn(steps: Callable[[int], None]) -> int:
    steps(3)
    start = time.perf_counter()
    steps(3)
    return max(1, round(TURN_S / ((time.perf_counter() - start) / 3)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two models only")
    parser.add_argument("--seconds", type=float, default=15.0, help="time a model (default: 15)")
    parser.add_argument("--tensorflow", metavar="PYTHON", help="an interpreter with TensorFlow")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--plot", type=Path, help="draw the ratios into this file")
    arguments = parser.parse_args()
    torch.set_num_threads(NUM_REPLICAS)
    names = ["MLP 256", "Embedding"] if arguments.quick else list(CASES)
    rows = []
    with ExitStack() as stack:
        crews: dict[str, Trainers] = {
            "workers": Workers(NUM_REPLICAS),
            "DDP": Ddp(NUM_REPLICAS, "gloo"),
            "DDP uo": Ddp(NUM_REPLICAS, "unisono"),
        }
        for crew in crews.values():
            stack.enter_context(closing(crew))
        peer = None
        if arguments.tensorflow:
            peer = stack.enter_context(closing(TensorFlow(arguments.tensorflow)))
        for name in stack.enter_context(Progress()).track(names, description="training steps"):
            rows.append(measure(name, arguments.seconds, crews, peer))
    show(rows)
    if arguments.json:
        write_json(arguments.json, shlex.join(["python", *sys.argv]), rows)
    if arguments.plot:
        plot(rows, arguments.plot)


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    names = list(rows[0]["ratios"])
    title = f"{NUM_REPLICAS} replicas, {machine()['cpu']}, kernel: {native_core().status}"
    versus = [f"DDP : {other}" for other in ("workers", "DDP uo")]
    table = Table("model", "parameters", "batch", "unisono", *names, *versus, title=title)
    for row in rows:
        table.add_row(
            row["model"],
            f"{row['parameters'] / 1e6:.2f} M",
            f"{NUM_REPLICAS} x {row['batch']}",
            f"{row['unisono_ms']:.2f} ms",
            *(f"{row['ratios'][name]:.2f}" for name in names),
            *(
                f"{row['ratios']['DDP'] / row['ratios'][other]:.2f}"
                for other in ("workers", "DDP uo")
            ),
        )
    Console().print(table)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the ratios as bars; longer than 1 is slower than Unisono."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axis = figure.subplots()
    names = list(rows[0]["ratios"])
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        positions = [i + (place - (len(names) - 1) / 2) * width for i in range(len(rows))]
        axis.bar(positions, [row["ratios"][name] for row in rows], width, label=name)
    axis.axhline(1, color="black", linewidth=1)
    axis.set_xticks(range(len(rows)), [row["model"] for row in rows])
    axis.set_ylabel("time of a step, unisono = 1")
    axis.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
