"""What the loss of a worker costs with `elastic=True`, and what a step costs that loses nobody.

    python benchmarks/elastic.py                # about a minute

`lost` is the time from the kill of one of four workers to the next finished step of all others.
Beside it stands torchrun, which starts all workers of a DistributedDataParallel program again. They
load the checkpoint that rank 0 has saved after the last step. Elastic Horovod is described, not
measured: what its documentation says is in docs/elastic.md. `step` has two workers that make
steps with `elastic=True` and without it in turn, so that a busy machine disturbs both alike: the
median of the ratios of neighboring turns. `work` is the same for the time of the processor.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import unisono as uo
from unisono_tools.benchmarks.peers.models import CASES, Case, train_step
from unisono_tools.benchmarks.rows import machine
from unisono_tools.processes import free_ports

NUM_WORKERS, NUM_REPLICAS = 4, 4
STEPS_PER_TURN = 10
STEPS_BEFORE = 5
STEPS_PER_EPOCH = 1000

Program: TypeAlias = "subprocess.Popen[str]"
Times: TypeAlias = tuple[float, float]


def main() -> None:
    """Prints the numbers, or is one of the workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="time for `step` (default: 20)")
    parser.add_argument("--losses", type=int, default=5, help="how many losses (default: 5)")
    parser.add_argument("--model", nargs="+", default=["MLP 256", "ConvNet"], choices=list(CASES))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        torch.set_num_threads(1)
        task = json.loads(options.worker)
        globals()[task.pop("role")](**task)
        return
    case = options.model[0]
    print(f"{NUM_WORKERS} workers, {machine()['cpu']}, {os.cpu_count()} cores")
    for name, measure in (("elastic=True", loss_of_elastic), ("torchrun", loss_of_torchrun)):
        times = [measure(case) for _ in range(options.losses)]
        if times:
            low, middle, high = min(times), statistics.median(times), max(times)
            print(f"lost   {name:14}{middle:6.2f} s   ({low:.2f} to {high:.2f})", flush=True)
    for model in options.model:
        plain, *ratios = step_ratios(model, options.seconds)
        wall, work = map(statistics.median, ratios)
        told = f"elastic {wall:.4f} x, work {work:.4f} x"
        print(f"step   {model:14}{plain * 1e3:6.2f} ms   {told}", flush=True)


def loss_of_elastic(model: str) -> float:
    """Returns the seconds from a kill to the next finished step of the survivors."""
    with workers("train_elastic", NUM_WORKERS, model=model) as started:
        for one in started:
            _hear(one, "step", STEPS_BEFORE)
        victim = random.randrange(NUM_WORKERS)
        killed = _kill(started[victim].pid)
        survivors = [one for rank, one in enumerate(started) if rank != victim]
        return float(max(_hear(one, "went on")["time"] for one in survivors)) - killed


def loss_of_torchrun(model: str) -> float:
    """Returns the seconds from a kill to the next finished step after a restart."""
    with tempfile.TemporaryDirectory() as folder:
        task = {"role": "train_with_checkpoints", "model": model, "folder": folder}
        options = ["--standalone", "--nproc-per-node", str(NUM_WORKERS), "--max-restarts", "5"]
        command = [sys.executable, "-m", "torch.distributed.run", *options]
        # Otherwise Gloo finds the addresses of the workers before the restart in the shared store.
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        worker = [__file__, "--worker", json.dumps(task)]
        with _program([*command, *worker], **own_store) as torchrun:
            pids: dict[int, int] = {}
            while len(pids) < NUM_WORKERS:
                told = _hear(torchrun, "began")
                pids[told["rank"]] = told["pid"]
            _hear(torchrun, "step", STEPS_BEFORE)
            killed = _kill(pids[random.randrange(NUM_WORKERS)])
            done: dict[int, float] = {}
            while len(done) < NUM_WORKERS:
                told = _hear(torchrun, "went on")
                done[told["rank"]] = told["time"]
            return max(done.values()) - killed


def step_ratios(model: str, seconds: float) -> tuple[float, list[float], list[float]]:
    """Returns the seconds of a plain step, and how many times as long elastic ones take.

    The last ratios are those of the processor's time, which a busy machine disturbs less.
    """
    pairs: list[tuple[Times, Times]] = []
    with workers("take_turns", 2, model=model) as started:
        for one in started:
            _hear(one, "ready")
        end = time.monotonic() + seconds
        while time.monotonic() < end or not pairs:
            order = [False, True] if len(pairs) % 2 else [True, False]
            times = {elastic: _ask(started, elastic=elastic) for elastic in order}
            pairs.append((times[False], times[True]))
    plain = statistics.median(one[0] for one, _ in pairs)
    return plain, [b[0] / a[0] for a, b in pairs], [b[1] / a[1] for a, b in pairs]


def _ask(started: Sequence[Program], *, elastic: bool) -> Times:
    """Returns the time of the slowest worker, and the sum of their work."""
    for one in started:
        assert one.stdin is not None
        print(int(elastic), file=one.stdin, flush=True)
    told = [_hear(one, "turn")["times"] for one in started]
    return max(time for time, _ in told), sum(work for _, work in told)


class Training:
    """A model that trains with a strategy, step by step."""

    def __init__(self, case: Case, strategy: uo.Strategy) -> None:
        self._strategy = strategy
        torch.manual_seed(0)
        with strategy.scope():
            self._model = case.make_model()
            self._optimizer = case.optimizer(self._model)
        parts = [case.batch(number) for number in range(strategy.num_replicas_in_sync)]
        batch = tuple(torch.cat(part) for part in zip(*parts, strict=True))
        self._distributed = strategy.experimental_distribute_dataset([batch] * STEPS_PER_EPOCH)
        self._batches: Iterator[Any] = iter(())

    def step(self) -> float:
        """Returns the loss."""
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self._distributed)
            batch = next(self._batches)
        return float(self._strategy.reduce("MEAN", self._strategy.run(self._on_replica, batch)))

    def _on_replica(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return train_step(self._model, self._optimizer, (inputs, labels))


def strategy_of(rank: int, ports: list[int], *, num_replicas: int, elastic: bool) -> Any:
    """Returns the strategy of a worker with one CPU."""
    resolver = uo.cluster_resolver.SimpleClusterResolver(
        {"worker": [f"127.0.0.1:{port}" for port in ports]}, task_type="worker", task_id=rank
    )
    return uo.MultiWorkerMirroredStrategy(
        resolver, devices=["cpu:0"], num_replicas=num_replicas, elastic=elastic
    )


class Losses(logging.Handler):
    """Counts the lines that say that a worker was lost."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


def train_elastic(rank: int, ports: list[list[int]], model: str) -> None:
    """A worker that makes steps until it is killed or the others have lost one."""
    losses = Losses(logging.WARNING)
    logging.getLogger("unisono").addHandler(losses)
    strategy = strategy_of(rank, ports[0], num_replicas=NUM_REPLICAS, elastic=True)
    training = Training(CASES[model], strategy)
    while not losses.count:
        training.step()
        _tell("step")
    _tell("went on", time=time.monotonic())
    sys.stdin.read()


def train_with_checkpoints(model: str, folder: str) -> None:
    """A worker of torchrun."""
    rank, path = int(os.environ["RANK"]), Path(folder, "checkpoint")
    case, is_again = CASES[model], path.exists()
    torch.distributed.init_process_group("gloo")
    _tell("began", rank=rank, pid=os.getpid())
    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(case.make_model())
    optimizer = case.optimizer(ddp)
    if is_again:
        saved = torch.load(path)
        ddp.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    batch = case.batch(rank)
    while True:
        train_step(ddp, optimizer, batch)
        if is_again:
            _tell("went on", rank=rank, time=time.monotonic())
            sys.stdin.read()
        if rank == 0:
            state = {"model": ddp.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, f"{path}.new")
            os.replace(f"{path}.new", path)
            _tell("step")


def take_turns(rank: int, ports: list[list[int]], model: str) -> None:
    """A worker that makes steps, with or without `elastic=True`, as the command says."""
    both = [
        Training(CASES[model], strategy_of(rank, own, num_replicas=2, elastic=elastic))
        for own, elastic in zip(ports, (False, True), strict=True)
    ]
    for one in both:
        _turn(one)
    _tell("ready")
    for line in sys.stdin:
        _tell("turn", times=_turn(both[int(line)]))


def _turn(training: Training) -> Times:
    """Returns the seconds of a step, and those that the processor worked on it here."""
    start, worked = time.perf_counter(), time.process_time()
    for _ in range(STEPS_PER_TURN):
        training.step()
    worked = time.process_time() - worked
    return (time.perf_counter() - start) / STEPS_PER_TURN, worked / STEPS_PER_TURN


@contextmanager
def workers(role: str, count: int, **task: Any) -> Iterator[list[Program]]:
    """Starts workers of this script, and ends them."""
    ports = [free_ports(count) for _ in range(2)]
    with ExitStack() as stack:
        tasks = [{"role": role, "rank": rank, "ports": ports, **task} for rank in range(count)]
        command = [sys.executable, __file__, "--worker"]
        yield [stack.enter_context(_program([*command, json.dumps(one)])) for one in tasks]


@contextmanager
def _program(command: Sequence[str], **environ: str) -> Iterator[Program]:
    pipe = subprocess.PIPE
    # What torchrun and the survivors say of the loss is of no interest here.
    with (
        open(os.devnull, "w") as nothing,
        subprocess.Popen(
            command,
            env=os.environ | environ,
            stdin=pipe,
            stdout=pipe,
            stderr=nothing,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield process
        finally:
            # torchrun starts its children in new sessions, and ends them on SIGTERM.
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def _tell(kind: str, **more: Any) -> None:
    # In one piece, as several workers write to the same pipe.
    os.write(1, json.dumps({"kind": kind, **more}).encode() + b"\n")


def _hear(program: Program, kind: str, count: int = 1) -> Any:
    """Returns the next thing of a kind that a program tells, or one after that."""
    assert program.stdout is not None
    for line in program.stdout:
        told = json.loads(line)
        count -= told["kind"] == kind
        if count == 0:
            return told
    raise RuntimeError(f"{program.args!r} has ended before it said {kind!r}.")


def _kill(process_id: int) -> float:
    """Returns when it was killed."""
    os.kill(process_id, signal.SIGKILL)
    return time.monotonic()


if __name__ == "__main__":
    main()
