"""What a rank does while a failure comes: random collectives, the same on every rank."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import PrefixStore

from processes.crew import Desk
from processes.injections import UNEQUAL, Fault, Injection, Report, reported
from processes.leftovers import Holdings
from unisono.communicators import Communicator, connect
from unisono.communicators.gloo import make_gloo_group
from unisono.options import CommunicationImplementation, ReduceOp

_REDUCTIONS = ("all_reduce", "reduce_scatter")
_ROOTED = ("broadcast", "gather")
_KINDS = (*_REDUCTIONS, *_ROOTED, "all_gather", "barrier")
_NOTHING = Holdings(descriptors=64, threads=64, segments=0, ports=0)


@dataclass(frozen=True)
class Call:
    """A collective that can be made on any communicator."""

    kind: str
    op: ReduceOp
    shape: tuple[int, ...]
    dtype: torch.dtype
    root: int

    def __call__(self, communicator: Communicator) -> None:
        tensor = torch.ones(self.shape, dtype=self.dtype)
        if self.kind in _REDUCTIONS:
            getattr(communicator, self.kind)(self.op, [tensor])
        elif self.kind in _ROOTED:
            getattr(communicator, self.kind)(tensor, self.root)
        elif self.kind == "all_gather":
            communicator.all_gather(tensor)
        else:
            communicator.barrier()


def _calls(rng: random.Random, size: int) -> Iterator[Call]:
    while True:
        yield Call(
            rng.choice(_KINDS),
            rng.choice([ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PROD]),
            rng.choice([(), (0,), (3, 5), (1000,), (300_000,)]),
            rng.choice([torch.float32, torch.float64]),
            rng.randrange(size),
        )


def _unequal(fault: Fault, call: Call, rng: random.Random, size: int) -> tuple[Call, Call]:
    """Returns what the others call, and what the culprit calls."""
    kinds = {Fault.ORDER: ("barrier",), Fault.ROOT: _ROOTED}.get(fault, _REDUCTIONS)
    right = replace(call, kind=rng.choice(kinds))
    wrong = {
        Fault.SHAPE: replace(right, shape=(*right.shape, 2)),
        Fault.DTYPE: replace(right, dtype=torch.float16),
        Fault.OP: replace(right, op=ReduceOp.MAX),
        Fault.ORDER: replace(right, kind=rng.choice(_KINDS[:-1])),
        Fault.ROOT: replace(right, root=(right.root + 1) % size),
    }
    return right, wrong[fault]


class Engine(NamedTuple):
    """What carries collectives, the environment that it needs, and its name if that matters.

    With `is_shared`, there is one Gloo group of all ranks, as in a process group of torch.
    """

    implementation: CommunicationImplementation
    environ: tuple[tuple[str, str], ...] = ()
    name: str | None = None
    is_shared: bool = False


def suffer(desk: Desk, injection: Injection, rank: int, engine: Engine) -> Report | None:
    """Makes collectives until a failure ends them."""
    os.environ.update(engine.environ)
    made: list[Communicator] = []
    is_culprit = rank == injection.culprit

    def body() -> None:
        injection.meet(desk, rank)
        if is_culprit and injection.fault is Fault.KILLED_AT_START:
            injection.strike(desk)
        own, seconds = PrefixStore(injection.name, desk.store), injection.seconds_before

        def gloo(check_health: Callable[[float], None]) -> Any:
            return make_gloo_group(
                PrefixStore("gloo", own),
                rank,
                injection.size,
                timeout_seconds=seconds,
                check_health=check_health,
            )

        communicator = connect(
            own,
            rank,
            injection.size,
            timeout_seconds=seconds,
            implementation=engine.implementation,
            gloo=gloo if engine.is_shared else None,
        )
        made.append(communicator)
        assert engine.name in (None, communicator.name), communicator.name
        _check_sum(communicator)
        _go_on(desk, injection, communicator, is_culprit=is_culprit)

    def close() -> None:
        for communicator in made:
            communicator.close()
            communicator.close()
        made.clear()

    # MPI listens from its start to the end of the process.
    limits = _NOTHING._replace(ports=8) if engine.name == "MPI" else _NOTHING
    return reported(body, close, limits)


def _check_sum(communicator: Communicator) -> None:
    """After every failure there is a group that works."""
    total = torch.full((7,), 10.0**communicator.rank)
    communicator.all_reduce(ReduceOp.SUM, [total])
    assert total.tolist() == [float("1" * communicator.size)] * 7


def _go_on(
    desk: Desk, injection: Injection, communicator: Communicator, *, is_culprit: bool
) -> None:
    rng = random.Random(injection.seed)
    end = math.inf
    for step, call in enumerate(_calls(rng, injection.size)):
        assert time.monotonic() < end, f"{injection}: the collectives went on as before"
        chosen = call
        if step == injection.step:
            end = time.monotonic() + injection.seconds + 20
            communicator.set_timeout(injection.seconds)
            if injection.fault in UNEQUAL:
                right, wrong = _unequal(injection.fault, call, rng, injection.size)
                chosen = wrong if is_culprit else right
            if is_culprit and injection.fault is not Fault.KILLED_AT_START:
                injection.strike(desk)
                if injection.leaves:
                    return
                if injection.fault is Fault.LATE:
                    injection.be_late(desk)
        chosen(communicator)
