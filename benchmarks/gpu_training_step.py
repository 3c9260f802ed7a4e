"""A training step with several replicas on one GPU, against plain torch.

    python benchmarks/gpu_training_step.py                 # all tables
    python benchmarks/gpu_training_step.py --tables host --short    # about a minute

Replicas on virtual GPUs share the real one. All competitors of one process are taken in turn and
timed with device events; numbers are medians.

The first table, `compute`, has large batches. The best that R replicas can do there is the compute
of R forward and backward passes and one update. `limit` is that, through plain torch, with the same
batches. The second table, `host`, has batches so small that the host is the limit:

plain           one step of one replica, plain torch
plain graph     the same as one CUDA graph
apart           R processes of plain torch on this GPU that never meet
unisono         R replicas in one process
captured        the same through `unisono.function`
returns         how long the host is in `run` for a captured step
drift           by how much captured steps lead elsewhere than uncaptured ones; 0 if all kernels are
                the same, and anything otherwise: with so small batches, rounding changes gradients

The third table, `workers`, has the same batches in R processes that share this GPU, and exchange
gradients. The GPU runs one process at a time, so all of them are slower than on R GPUs:

ddp             DistributedDataParallel over NCCL
unisono         `MultiWorkerMirroredStrategy` over NCCL
one graph       the same through `unisono.function`, with NCCL in the graph
many graphs     through host memory, between the graphs of a step

On R real GPUs a step of one process cannot be shorter than the time of its host, which the second
table measures. Before the first one is timed, a step from the same weights must leave the weights
that plain torch has after the mean gradient. `apart` is the difference, as a part of the change.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import gpu_models
import torch
from gpu_timing import Work, interleaved
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import unisono as uo
from unisono_tools.benchmarks.rows import machine
from unisono_tools.processes import free_ports

Batch = tuple[Tensor, Tensor]

# Captured steps are compared with uncaptured ones after this many. The first ones run uncaptured.
NUM_COMPARED = 12
DEADLINE_S = 120.0


class Case(NamedTuple):
    """A model, and one replica's batch."""

    make_model: Callable[[], nn.Module]
    make_batch: Callable[..., Batch]
    batch_size: int


COMPUTE = {
    "ResNet-50": Case(gpu_models.resnet50, gpu_models.images, 256),
    "GPT-2 small": Case(gpu_models.Gpt2, gpu_models.texts, 16),
}
HOST = {
    "ResNet-50": Case(gpu_models.resnet50, partial(gpu_models.images, size=64), 2),
    "GPT-2 small": Case(gpu_models.Gpt2, partial(gpu_models.texts, length=64), 2),
}


def forward_backward(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    with torch.autocast("cuda", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    return loss.detach()


class Plain:
    """The compute of R replicas and one update, with nothing between them."""

    def __init__(self, case: Case, batches: Sequence[Batch]) -> None:
        torch.manual_seed(0)
        self.model = case.make_model().cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.batches = batches

    def step(self) -> None:
        for batch in self.batches:
            self.optimizer.zero_grad()
            forward_backward(self.model, batch)
        self.optimizer.step()

    def step_with_mean(self) -> None:
        self.optimizer.zero_grad()
        for batch in self.batches:
            forward_backward(self.model, batch)
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad /= len(self.batches)
        self.optimizer.step()

    def graph(self) -> Work:
        """Returns a step as one CUDA graph."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.step()

        def replay() -> None:
            # The graph has the addresses of the weights, so this object must live on.
            assert self.model
            graph.replay()

        return replay


class Unisono:
    """R replicas on virtual GPUs."""

    def __init__(
        self,
        case: Case,
        batches: Sequence[Batch],
        strategy: uo.Strategy | None = None,
        *,
        is_captured: bool = False,
    ) -> None:
        devices = [f"cuda:{i}" for i in range(len(batches))]
        self.strategy = strategy or uo.MirroredStrategy(devices)
        torch.manual_seed(0)
        with self.strategy.scope():
            self.model = case.make_model()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.batch = [uo.PerReplica(parts, devices) for parts in zip(*batches, strict=True)]
        self.function: Callable[..., Any] = self._replica_step
        if is_captured:
            self.function = uo.function(self._replica_step, strict=True)

    def step(self) -> None:
        self.strategy.run(self.function, args=self.batch)

    def _replica_step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = forward_backward(self.model, (inputs, labels))
        self.optimizer.step()
        return loss


def difference(case: Case, expected: nn.Module, found: nn.Module) -> float:
    """Returns by how much the weights differ, in parts of how far they went from the first ones."""
    torch.manual_seed(0)
    start = case.make_model().cuda()
    modules = zip(start.parameters(), expected.parameters(), found.parameters(), strict=True)
    moved, apart = 0.0, 0.0
    with torch.no_grad():
        for before, one, other in modules:
            moved += float((one - before).double().square().sum())
            apart += float((one - other).double().square().sum())
    return math.sqrt(apart / moved)


def check(name: str, case: Case, batches: Sequence[Batch]) -> float:
    """Returns the difference from plain torch after a step; ends the program if it is large."""
    plain, ours = Plain(case, batches), Unisono(case, batches)
    plain.step_with_mean()
    ours.step()
    ours.strategy.close()
    found = difference(case, plain.model, ours.model)
    if found > 0.02:
        raise SystemExit(f"{name}, {len(batches)} replicas: {found:.3g} apart.")
    return found


def drift(case: Case, batches: Sequence[Batch]) -> float:
    """Returns the difference of captured steps from uncaptured ones, after some of both."""
    models = []
    for is_captured in (False, True):
        ours = Unisono(case, batches, is_captured=is_captured)
        for _ in range(NUM_COMPARED):
            ours.step()
        ours.strategy.close()
        models.append(ours.model)
    return difference(case, *models)


def compute_row(name: str, replicas: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures large batches."""
    case = COMPUTE[name]
    batches = make_batches(case, replicas)
    apart = check(name, case, batches)
    plain, ours = Plain(case, batches), Unisono(case, batches)
    works: dict[str, Work] = {"limit": plain.step, "unisono": ours.step}
    times = interleaved(works, rounds=options.rounds, calls=options.steps)
    ours.strategy.close()
    ratio = times["unisono"] / times["limit"]
    return {"model": name, "replicas": replicas, **times, "unisono / limit": ratio, "apart": apart}


def host_row(name: str, replicas: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures batches so small that the host is the limit."""
    case = HOST[name]
    batches = make_batches(case, replicas)
    drifted = drift(case, batches)
    ours, captured = Unisono(case, batches), Unisono(case, batches, is_captured=True)
    works: dict[str, Work] = {
        "plain": Plain(case, batches[:1]).step,
        "plain graph": Plain(case, batches[:1]).graph(),
        "unisono": ours.step,
        "captured": captured.step,
    }
    for _ in range(NUM_COMPARED):
        captured.step()
    times = interleaved(works, rounds=options.rounds, calls=options.steps)
    returns = host_milliseconds(captured.step, options.rounds * options.steps)
    ours.strategy.close()
    captured.strategy.close()
    return {
        "model": name,
        "replicas": replicas,
        **times,
        "apart": apart_milliseconds(name, replicas, options.rounds * options.steps),
        "returns": returns,
        "unisono / R plain": times["unisono"] / replicas / times["plain"],
        "captured / R graph": times["captured"] / replicas / times["plain graph"],
        "drift": drifted,
    }


def make_batches(case: Case, replicas: int) -> list[Batch]:
    torch.manual_seed(replicas)
    return [case.make_batch(case.batch_size, device="cuda") for _ in range(replicas)]


def host_milliseconds(step: Work, count: int) -> float:
    """Returns how long the host is in a call that finds an idle GPU."""
    times = []
    for _ in range(count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def apart_milliseconds(name: str, replicas: int, count: int) -> float:
    """Returns the time of a step in processes of plain torch that run at the same time."""
    return in_processes(step_apart, name, replicas, count)


def in_processes(target: Callable[..., None], name: str, replicas: int, *args: Any) -> float:
    """Returns the median of what processes answer that run at the same time."""
    context = multiprocessing.get_context("spawn")
    start, answers = context.Barrier(replicas), context.Queue()
    crew = [
        context.Process(target=target, args=(name, *args, start, answers, rank), daemon=True)
        for rank in range(replicas)
    ]
    for process in crew:
        process.start()
    found: list[float] = [answers.get(timeout=DEADLINE_S) for _ in crew]
    for process in crew:
        process.join(timeout=DEADLINE_S)
    return statistics.median(found)


def step_apart(name: str, count: int, start: Barrier, answers: Any, _: int) -> None:
    """In its own process: takes steps, and answers with the milliseconds of one."""
    case = HOST[name]
    answers.put(milliseconds(Plain(case, make_batches(case, 1)).step, count, start))


def milliseconds(step: Work, count: int, start: Barrier) -> float:
    """Returns how long a step takes, from when all processes have warmed up."""
    for _ in range(NUM_COMPARED):
        step()
    torch.cuda.synchronize()
    start.wait(DEADLINE_S)
    begin = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin) / count


def workers_row(name: str, replicas: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures processes that exchange gradients."""
    row: dict[str, Any] = {"model": name, "workers": replicas}
    for kind in ("ddp", "unisono", "one graph", "many graphs"):
        ports = free_ports(replicas)
        count = options.rounds * options.steps
        row[kind] = in_processes(step_of_worker, name, replicas, kind, ports, count)
    row["ddp / one graph"] = row["ddp"] / row["one graph"]
    return row


def step_of_worker(
    name: str, kind: str, ports: list[int], count: int, start: Barrier, answers: Any, rank: int
) -> None:
    """In its own process: takes steps with the others, and answers with the milliseconds of one."""
    # NCCL refuses ranks that share a GPU, unless each seems to be on its own host.
    os.environ["NCCL_HOSTID"] = f"host-{rank}"
    case = HOST[name]
    batches = make_batches(case, 1)
    if kind == "ddp":
        address = f"tcp://127.0.0.1:{ports[0]}"
        torch.distributed.init_process_group("nccl", address, rank=rank, world_size=len(ports))
        plain = Plain(case, batches)
        plain.model = nn.parallel.DistributedDataParallel(plain.model)
        answers.put(milliseconds(plain.step, count, start))
        torch.distributed.destroy_process_group()
        return
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    resolver = uo.cluster_resolver.SimpleClusterResolver(cluster, task_type="worker", task_id=rank)
    engine = "RING" if kind == "many graphs" else "NCCL"
    strategy = uo.MultiWorkerMirroredStrategy(
        resolver,
        uo.experimental.CommunicationOptions(
            implementation=uo.experimental.CommunicationImplementation(engine)
        ),
        devices=["cuda:0"],
    )
    ours = Unisono(case, batches, strategy, is_captured=kind != "unisono")
    answers.put(milliseconds(ours.step, count, start))
    strategy.close()


ROWS = {"compute": compute_row, "host": host_row, "workers": workers_row}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--replicas", type=int, nargs="+")
    parser.add_argument("--models", nargs="+", choices=COMPUTE, default=list(COMPUTE))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="fewer rounds, and R = 1 and 8 alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.short else 7)
    content: dict[str, Any] = {"machine": machine(), "gpu": torch.cuda.get_device_name()}
    for table in options.tables:
        replicas = options.replicas or ([1, 8] if options.short else [1, 2, 4, 8])
        if table == "workers":
            replicas = options.replicas or [2]
        todo = [(name, number) for name in options.models for number in replicas]
        rows = []
        with Progress(transient=True) as progress:
            for name, number in progress.track(todo, description=table):
                with uo.testing.virtual_gpus(number):
                    rows.append(ROWS[table](name, number, options))
                torch.cuda.empty_cache()
        content[table] = rows
        print_table(table, rows)
        if options.json:
            options.json.write_text(json.dumps(content, indent=1) + "\n")


def print_table(title: str, rows: Sequence[dict[str, Any]]) -> None:
    table = Table(*rows[0], title=f"{title}, ms")
    for row in rows:
        table.add_row(
            *(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row.values())
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
