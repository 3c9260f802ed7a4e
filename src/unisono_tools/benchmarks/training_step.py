"""Training steps on CPU replicas, in one process and in several, against DDP and TensorFlow.

All competitors take turns of a few steps each until the time is up, so that a busy machine disturbs
them alike. Ratios are those of medians: how many times the time of Unisono, one process under
`MirroredStrategy`, the competitor needs.

captured    the same with `unisono.function`
workers     MultiWorkerMirroredStrategy, one process per replica, all on one host
DDP         DistributedDataParallel over Gloo, one process per replica
DDP uo      the same program over the backend "unisono"
TF graph    TensorFlow's MirroredStrategy on logical CPUs, the step a tf.function
limit       one copy of the model and its optimizer per thread, and threads that never meet: 1.0
            means that communication costs nothing, less than 1.0 what is left to win

Every replica has one thread and a batch of the same size, and the batch is there already;
TensorFlow chooses its threads itself, unless TF_NUM_INTRAOP_THREADS is set. `nn.DataParallel` does
not take part: on CPU it uses no second replica. Before a model is measured, the losses of its first
steps with Unisono, with workers and with DDP are compared, and the run ends if they differ.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from unisono.backend.process_group import fits_torch
from unisono_tools.benchmarks.failure import BenchmarkError
from unisono_tools.benchmarks.peers.coprocess import CoProcess
from unisono_tools.benchmarks.peers.ddp import Ddp
from unisono_tools.benchmarks.peers.in_process import Apart, Mirrored
from unisono_tools.benchmarks.peers.models import CASES
from unisono_tools.benchmarks.peers.trainers import Trainers
from unisono_tools.benchmarks.peers.workers import Workers
from unisono_tools.benchmarks.rows import Row
from unisono_tools.benchmarks.timing import Work, take_turns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = tuple(CASES)
QUICK_MODELS = ("MLP 256", "Embedding")
REPLICAS = (2,)
SEED = 0
NUM_COMPARED = 5
# Long enough that starting a turn, such as the message to DDP's processes, does not count.
TURN_S = 0.03
# What starts the processes of each competitor that has some.
CREWS: Mapping[str, Callable[[int], Trainers]] = {
    "workers": Workers,
    "DDP": partial(Ddp, backend="gloo"),
    **({"DDP uo": partial(Ddp, backend="unisono")} if fits_torch() else {}),
}


@dataclass(frozen=True)
class StepSweep:
    """Training steps of small models on CPU replicas.

    Attributes:
        models: The names of the models.
        seconds: The time of one model with one number of replicas.
        tensorflow: An interpreter that has TensorFlow.
        replicas: The numbers of replicas.
    """

    models: Sequence[str] = MODELS
    seconds: float = 15.0
    tensorflow: str | None = None
    replicas: Sequence[int] = REPLICAS
    name: str = "training step"

    def __post_init__(self) -> None:
        if min(self.replicas) < 1:
            raise ValueError(f"--replicas must be 1 or more, got {list(self.replicas)}.")

    @property
    def num_measurements(self) -> int:
        """See `Sweep`."""
        return len(self.models) * len(self.replicas)

    @property
    def left_out(self) -> Sequence[str]:
        """See `Sweep`."""
        return [] if self.tensorflow else ["TensorFlow (give --tensorflow PYTHON)"]

    def measurements(self) -> Generator[Sequence[Row], None, None]:
        """See `Sweep`."""
        for num_replicas in self.replicas:
            yield from self._measurements(num_replicas)

    def _measurements(self, num_replicas: int) -> Generator[Sequence[Row], None, None]:
        with ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(num_replicas)
            crews = {
                name: stack.enter_context(closing(make(num_replicas)))
                for name, make in CREWS.items()
            }
            peer = None
            if self.tensorflow:
                script = ("tensorflow_training.py", str(num_replicas))
                peer = CoProcess("TensorFlow", self.tensorflow, *script)
                stack.enter_context(closing(peer))
            for model in self.models:
                yield [self._measure(model, num_replicas, crews, peer)]

    def _measure(
        self,
        model: str,
        num_replicas: int,
        crews: Mapping[str, Trainers],
        peer: CoProcess | None,
    ) -> Row:
        case = CASES[model]
        with (
            closing(Mirrored(case, num_replicas, SEED)) as mirrored,
            closing(Mirrored(case, num_replicas, SEED, is_captured=True)) as captured,
            closing(Apart(case, num_replicas)) as apart,
        ):
            losses = mirrored.losses(NUM_COMPARED)
            check_losses(model, losses, "captured steps", captured.losses(NUM_COMPARED))
            takers: dict[str, Callable[[int], object]] = {"unisono": mirrored.steps}
            takers["captured"] = captured.steps
            for name, crew in crews.items():
                check_losses(model, losses, name, crew.prepare(model, SEED, NUM_COMPARED))
                takers[name] = crew.steps
            takers["limit"] = apart.steps
            if peer is not None:
                peer.ask({"case": model, "batch_size": case.batch_size})
                takers["TF graph"] = lambda num_steps: _tensorflow_steps(peer, num_steps)
            num_steps = _steps_per_turn(mirrored.steps)
            works = {name: _steps_of(steps, num_steps) for name, steps in takers.items()}
            series = take_turns(works, budget_s=self.seconds)
        series = {name: [turn / num_steps for turn in turns] for name, turns in series.items()}
        num_parameters = sum(parameter.numel() for parameter in case.make_model().parameters())
        num_samples = num_replicas * case.batch_size
        return Row.compare(
            {
                "model": model,
                "parameters": f"{num_parameters / 1e6:.2f} M",
                "batch": f"{num_replicas} x {case.batch_size}",
            },
            4 * num_parameters,
            series.pop("unisono"),
            series,
            lambda seconds: {"samples/s": num_samples / seconds},
        )

    def summary(self, rows: Sequence[Row]) -> str:
        """See `Sweep`."""
        return ""

    def draw(self, figure: Figure, rows: Sequence[Row]) -> None:
        """Draws the ratios as bars; longer than 1 is slower than Unisono."""
        figure.set_size_inches(9, 4)
        axis = figure.subplots()
        names = list(rows[0].ratios)
        width = 0.8 / len(names)
        for place, name in enumerate(names):
            positions = [i + (place - (len(names) - 1) / 2) * width for i in range(len(rows))]
            axis.bar(positions, [row.ratios[name] for row in rows], width, label=name)
        axis.axhline(1, color="black", linewidth=1)
        names = [f"{row.case['model']}\n{row.case['batch']}" for row in rows]
        axis.set_xticks(range(len(rows)), names)
        axis.set_ylabel("time of a step, unisono = 1")
        axis.legend()


def check_losses(model: str, own: list[float], name: str, others: list[float]) -> None:
    """Raises if the first steps of the two differ by more than float32 may."""
    if any(not math.isclose(a, b, rel_tol=1e-4) for a, b in zip(own, others, strict=True)):
        raise BenchmarkError(
            f"{model}: the losses of Unisono are {own}, those of {name} {others}. Please report "
            "this."
        )


def _steps_of(steps: Callable[[int], object], num_steps: int) -> Work:
    return lambda: steps(num_steps)


def _tensorflow_steps(peer: CoProcess, num_steps: int) -> None:
    loss = peer.ask({"steps": num_steps})["loss"]
    if not math.isfinite(loss):
        raise BenchmarkError(f"TensorFlow's loss is {loss}. Leave out `--tensorflow`.")


def _steps_per_turn(steps: Callable[[int], None]) -> int:
    steps(3)
    start = time.perf_counter()
    steps(3)
    return max(1, round(TURN_S / ((time.perf_counter() - start) / 3)))
