"""A small elastic job: workers that compute together, are lost, and come back."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import time
import traceback
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import unisono as uo
from processes.forked import PROCESSES
from processes.namespaces import enter
from unisono.cluster import Membership
from unisono.cluster.elastic import ElasticMembers, Met
from unisono.communicators.wire import share_state
from unisono.devices import cpu_slots
from unisono.errors import CommunicationError, WorkerLostError
from unisono.reductions import dealt
from unisono.workers.joining import join_elastic

REPLICAS = 6


@dataclass(frozen=True)
class Task:
    """What a worker does.

    Attributes:
        addresses: The addresses of all workers.
        index: Which of them it is.
        num_steps: How many steps there are.
        fate: What happens to it, by step: "kill" before the sum of the step, "kill after" it,
            "stop", or "leave".
        wait_for: It waits at these steps until so many workers are there.
        namespace: Where it runs, if not here.
        settings: `timeout_seconds`, `min_workers` and `implementation`.
        num_replicas: How many replicas it wants.
        pause: How many seconds it sleeps after a step.
        stops_after: A function of the library, as "module:name", and how often it returns before
            the worker stops.
        environ: Its environment variables.
    """

    addresses: list[str]
    index: int
    num_steps: int
    fate: dict[int, str] = field(default_factory=dict)
    wait_for: dict[int, int] = field(default_factory=dict)
    namespace: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    num_replicas: int = REPLICAS
    pause: float = 0.0
    stops_after: tuple[str, int] | None = None
    environ: dict[str, str] = field(default_factory=dict)


class Worker:
    """A process that works on a task, and what it tells."""

    def __init__(self, task: Task) -> None:
        self.pipe, theirs = PROCESSES.Pipe()
        self.process: BaseProcess = PROCESSES.Process(target=_run, args=(theirs, task), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self, kind: str, timeout: float = 60.0) -> Any:
        """Returns the next thing of a kind that it tells."""
        deadline = time.monotonic() + timeout
        while wait([self.pipe], deadline - time.monotonic()):
            told, value = self.pipe.recv()
            if told == kind:
                return value
            assert told != "failed", value
        raise AssertionError(f"nothing heard of {kind!r} for {timeout:g} s")

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wake_up(self) -> None:
        """Lets it go on, once it has stopped."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        deadline = time.monotonic() + 60
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, "it has not stopped"
            time.sleep(0.01)
        self.send(signal.SIGCONT)

    def end(self) -> None:
        """Kills it, whatever it does."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


def start(*tasks: Task) -> list[Worker]:
    """Starts workers that begin at the same time, so that nobody waits for a process to start."""
    started = [Worker(task) for task in tasks]
    for one in started:
        one.hear("ready", 120)
    for one in started:
        one.pipe.send("go")
    return started


def undisturbed(num_steps: int) -> list[float]:
    """What a job computes that loses nobody."""
    state = torch.zeros(3, dtype=torch.float64)
    for step in range(num_steps):
        _update(state, torch.cat([_term(state, step, one) for one in range(REPLICAS)]))
    return [float(one) for one in state]


def _term(state: Tensor, step: int, replica: int) -> Tensor:
    return torch.sin(state.sum() * 3 + step * 0.7 + replica).view(1)


def _update(state: Tensor, terms: Tensor) -> None:
    state.add_(torch.stack([terms.sum(), terms.prod(), terms.max()]))


def _run(pipe: Connection, task: Task) -> None:
    torch.set_num_threads(1)
    try:
        if task.namespace is not None:
            enter(task.namespace)
        os.environ.update(task.environ)
        pipe.send(("ready", None))
        pipe.recv()
        if task.stops_after is not None:
            _stop_after(*task.stops_after)
        program = _Program(pipe, task)
        try:
            program.work()
        except WorkerLostError as error:
            # It was given up, and joins again.
            pipe.send(("raised", (type(error).__name__, str(error))))
            program.leave()
            _Program(pipe, replace(task, fate={})).work()
    except CommunicationError as error:
        pipe.send(("raised", (type(error).__name__, str(error))))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))


def _stop_after(where: str, times: int) -> None:
    """Stops this process once, when a function of the library has returned so often."""
    module, _, function = where.partition(":")
    owner = importlib.import_module(module)
    original, returns = getattr(owner, function), itertools.count(1)

    def called(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        if next(returns) == times:
            os.kill(os.getpid(), signal.SIGSTOP)
        return found

    setattr(owner, function, called)


class _Program:
    def __init__(self, pipe: Connection, task: Task) -> None:
        self._pipe = pipe
        self._task = task
        self._state = torch.zeros(3, dtype=torch.float64)
        self._step: int | None = 0
        self._shared: Met | None = None
        settings = {"timeout_seconds": 30.0, "min_workers": 1} | task.settings
        min_workers = settings.pop("min_workers")
        resolver = uo.cluster_resolver.SimpleClusterResolver(
            {"worker": task.addresses}, task_type="worker", task_id=task.index
        )
        options = uo.experimental.CommunicationOptions(**settings)
        self._members: ElasticMembers
        self._members, _ = join_elastic(
            Membership.of(resolver), cpu_slots(1), options, task.num_replicas, min_workers
        )
        if self._members.met.joined:
            self._step = None
        self._settle(self._members.met)

    def work(self) -> None:
        while self._step is None or self._step < self._task.num_steps:
            met = self._members.met
            try:
                if self._shared is not met and len(set(met.positions)) > 1:
                    self._share(met)
                leaving, newcomers = self._do_step(met)
            except CommunicationError as error:
                place = None if self._step is None else (self._step,)
                self._settle(self._members.meet_again(place, error, admits=True))
                continue
            if met.rank in leaving:
                self._members.leave()
                self._pipe.send(("left", None))
                return
            if leaving or newcomers:
                assert self._step is not None
                self._settle(self._members.meet_again((self._step,), None, leaving, admits=True))
        self._pipe.send(("done", ([float(one) for one in self._state], self._members.met.members)))
        self._members.leave()

    def _settle(self, met: Met) -> None:
        self._pipe.send(("met", (met.members, met.lost, met.joined, met.generation)))

    def _share(self, met: Met) -> None:
        state = share_state(
            met.communicator, {"state": self._state, 1: (self._step, None, 0.1)}, met.source
        )
        self._state.copy_(state["state"])
        self._step = state[1][0]
        assert state[1] == (self._step, None, 0.1)
        self._shared = met

    def _do_step(self, met: Met) -> tuple[list[int], bool]:
        """Returns which ranks want to leave, and whether somebody wants to join."""
        step = self._step
        assert step is not None
        if step == 0:
            self._pipe.send(("began", None))
        fate = self._task.fate.get(step, "")
        if fate == "kill":
            self.kill()
        if fate == "stop":
            # Not once more, if the step is made again.
            del self._task.fate[step]
            os.kill(os.getpid(), signal.SIGSTOP)
        enough = len(met.members) >= self._task.wait_for.get(step, 0)
        counts = dealt(REPLICAS, len(met.members))
        first = sum(counts[: met.rank])
        terms = [_term(self._state, step, first + n) for n in range(counts[met.rank])]
        flags = [fate == "leave", self._members.newcomers(), enough]
        said = met.communicator.all_gather(torch.cat([torch.tensor(flags).double(), *terms]))
        leaving = [rank for rank, one in enumerate(said) if one[0] and len(said) > 1]
        if all(one[2] for one in said):
            _update(self._state, torch.cat([one[3:] for one in said]))
            self._step = step + 1
        else:
            time.sleep(0.02)
        time.sleep(self._task.pause)
        if fate == "kill after":
            self.kill()
        return leaving, any(bool(one[1]) for one in said)

    def leave(self) -> None:
        self._members.leave()

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
