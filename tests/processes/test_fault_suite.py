"""Failures at random moments, in processes that go on after each of them.

`UNISONO_FAULTS` sets how many, 50 by default. Above 200 they differ in every run. Every test prints
its seed; `UNISONO_FAULT_SEED` repeats a run that has failed.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from processes.certificates import CAN_MAKE, keys, new_authority
from processes.collective_faults import Engine, suffer
from processes.crew import Crew
from processes.injections import UNEQUAL, Fault, Injection, draw, inject
from processes.mpi_crew import HAS_MPI, MPIRUN, MpiCrew
from processes.ports import free_port
from processes.training_faults import Job, train
from unisono.kernels import native_core
from unisono.options import CommunicationImplementation
from unisono_tools.namespaces import is_open_mpi

AUTO, RING = CommunicationImplementation.AUTO, CommunicationImplementation.RING
TCP = CommunicationImplementation.TCP
NUM_FAULTS = int(os.environ.get("UNISONO_FAULTS", "50"))
# One seed where every run must tell the same of a change; a longer run draws another each time.
_USUAL_SEED = 372356407
SEED = int(
    os.environ.get("UNISONO_FAULT_SEED")
    or (random.SystemRandom().randrange(1 << 30) if NUM_FAULTS > 200 else _USUAL_SEED)
)
SECONDS_FOR_ONE = 5.0

USUAL = {
    Fault.KILLED: 0.16,
    Fault.KILLED_AT_START: 0.06,
    Fault.STOPPED: 0.1,
    Fault.LATE: 0.06,
    Fault.ABSENT: 0.06,
    Fault.LEAVES: 0.06,
    Fault.PAUSED: 0.06,
    Fault.LOCKED: 0.06,
}

pytestmark = pytest.mark.timeout(200 + SECONDS_FOR_ONE * NUM_FAULTS)
needs_native = pytest.mark.skipif(
    native_core().kernel is None, reason=f"needs the native core: {native_core().status}"
)


def faults(rng: random.Random, share: float, weights: dict[Fault, float]) -> list[Fault]:
    """Draws as many failures as are the share of a test; what no weight is given to is unequal."""
    num = round(share * NUM_FAULTS)
    rest = (1 - sum(weights.values())) / len(UNEQUAL)
    weights = weights | dict.fromkeys(UNEQUAL, rest)
    # Of few failures, too, there is one of each kind.
    once = rng.sample(sorted(weights, key=lambda fault: fault.value), min(num, len(weights)))
    return once + rng.choices(list(weights), list(weights.values()), k=num - len(once))


@contextmanager
def crews_of(*sizes: int, num_hosts: int = 1) -> Iterator[list[Crew]]:
    """As many crews as fit on a small machine, as most of the time all of them wait."""
    with ExitStack() as stack:
        yield [stack.enter_context(Crew(size, num_hosts)) for size in sizes]


def shared_out(
    rng: random.Random, drawn: list[Fault], crews: Sequence[Crew], seconds: float
) -> list[tuple[Crew, list[Injection]]]:
    """Gives each crew its share of the failures."""
    return [
        (crew, draw(rng, "fault", drawn[start :: len(crews)], len(crew.members), seconds))
        for start, crew in enumerate(crews)
    ]


def together(
    crews: Sequence[tuple[Crew, list[Injection]]], run: Callable[[Crew, Injection], None]
) -> int:
    """Lets all crews suffer at the same time; returns how often."""

    def suffer_all(crew: Crew, injections: list[Injection]) -> int:
        for injection in injections:
            run(crew, injection)
        return len(injections)

    with ThreadPoolExecutor(len(crews)) as pool:
        futures = [pool.submit(suffer_all, *one) for one in crews]
    return sum(future.result() for future in futures)


@pytest.fixture
def rng() -> random.Random:
    print(f"UNISONO_FAULT_SEED={SEED}")
    return random.Random(SEED)


@needs_native
def test_shared_memory_at_random_moments(rng: random.Random) -> None:
    drawn = faults(rng, 0.4, {**USUAL, Fault.KILLED: 0.25})
    with crews_of(2, 3, 5, 2, 3) as crews:
        given = shared_out(rng, drawn, crews, seconds=3.0)
        one_engine = Engine(AUTO)
        assert together(given, lambda crew, one: inject(crew, one, suffer, 2.0, one_engine)) == len(
            drawn
        )


def over_networks(crews: Sequence[Crew], rng: random.Random, flat: Engine, folder: Path) -> None:
    """Lets crews suffer failures, over Gloo, TCP and encrypted TCP in turn."""
    over = [flat, Engine(TCP)]
    if CAN_MAKE:
        over.append(Engine(TCP, tuple(keys(folder, new_authority(), "host.test").items())))
    engines = dict(zip(crews, itertools.cycle(over), strict=False))
    drawn = faults(rng, 0.2, USUAL)
    given = shared_out(rng, drawn, crews, seconds=4.0)
    assert together(given, lambda crew, one: inject(crew, one, suffer, 4.0, engines[crew])) == len(
        drawn
    )


def test_networks_at_random_moments(rng: random.Random, tmp_path: Path) -> None:
    with crews_of(2, 3, 3, 3, 2) as crews:
        over_networks(crews, rng, Engine(RING), tmp_path)


@needs_native
def test_shared_memory_inside_two_hosts_at_random_moments(
    rng: random.Random, tmp_path: Path
) -> None:
    with crews_of(4, 4, 4, num_hosts=2) as crews:
        over_networks(crews, rng, Engine(AUTO, is_shared=True), tmp_path)


@pytest.mark.skipif(not HAS_MPI, reason="needs mpirun and mpi4py")
def test_mpi_at_random_moments(rng: random.Random, tmp_path: Path) -> None:
    # Nobody survives a rank that dies while MPI starts. Later on, Open MPI lets the others live.
    lives = is_open_mpi([str(MPIRUN)])
    weights = USUAL | {Fault.KILLED_AT_START: 0.0, Fault.KILLED: 0.1 if lives else 0.0}
    drawn = [one for one in faults(rng, 0.2, weights) if weights.get(one) != 0]
    engine = Engine(AUTO, name="MPI")
    with MpiCrew(3, tmp_path, ["--with-ft", "ulfm"] if lives else []) as crew:
        for one in draw(rng, "fault", drawn, 3, seconds=4.0):
            inject(crew, one, suffer, 4.0, engine)


def test_training_at_random_moments(rng: random.Random) -> None:
    drawn = faults(rng, 0.2, {**USUAL, Fault.KILLED: 0.3, Fault.LEAVES: 0.1})

    def run(crew: Crew, one: Injection) -> None:
        num_replicas, implementation = jobs[crew]
        inject(crew, one, train, 2.0, Job(free_port(), num_replicas, implementation))

    with crews_of(2, 3, 2, 2, 3) as crews:
        kinds = [(2, AUTO), (1, AUTO), (1, RING), (2, AUTO), (1, AUTO)]
        jobs = dict(zip(crews, kinds, strict=True))
        given = shared_out(rng, drawn, crews, seconds=6.0)
        assert together(given, run) == len(drawn)
