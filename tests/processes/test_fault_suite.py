"""Failures at random moments, in processes that go on after each of them.

`UNISONO_FAULTS` says how many, 200 if not set. More than that are drawn anew in every run;
`UNISONO_FAULT_SEED` makes one again that has failed: every test prints its seed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from processes.collective_faults import suffer
from processes.crew import Crew
from processes.injections import UNEQUAL, Fault, Injection, draw, inject
from processes.training_faults import Job, free_port, train
from unisono.kernels import native_core
from unisono.options import CommunicationImplementation

AUTO, RING = CommunicationImplementation.AUTO, CommunicationImplementation.RING
NUM_FAULTS = int(os.environ.get("UNISONO_FAULTS", "200"))
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
}

pytestmark = pytest.mark.timeout(120 + SECONDS_FOR_ONE * NUM_FAULTS)
needs_native = pytest.mark.skipif(
    native_core().kernel is None, reason=f"needs the native core: {native_core().status}"
)


def faults(rng: random.Random, share: float, weights: dict[Fault, float]) -> list[Fault]:
    """Draws as many failures as are the share of a test; what no weight is given to is unequal."""
    num = round(share * NUM_FAULTS)
    drawn = [fault for fault, weight in weights.items() for _ in range(round(weight * num))]
    unequal = [UNEQUAL[number % len(UNEQUAL)] for number in range(num - len(drawn))]
    drawn += unequal
    rng.shuffle(drawn)
    return drawn


def together(
    crews: Sequence[tuple[Crew, list[Injection]]], run: Callable[[Crew, Injection], None]
) -> int:
    """Lets all crews suffer at the same time, as most of it is waiting; returns how often."""

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
    drawn = faults(rng, 0.55, {**USUAL, Fault.KILLED: 0.25})
    with Crew(2) as two, Crew(3) as three, Crew(5) as five:
        crews = [
            (crew, draw(rng, "fault", drawn[start::3], len(crew.members), seconds=1.5))
            for start, crew in enumerate([two, three, five])
        ]
        assert together(crews, lambda crew, one: inject(crew, one, suffer, 2.0, AUTO)) == len(drawn)


def test_gloo_at_random_moments(rng: random.Random) -> None:
    drawn = faults(rng, 0.125, USUAL)
    with Crew(2) as two, Crew(3) as three, Crew(3) as another:
        crews = [
            (crew, draw(rng, "fault", drawn[start::3], len(crew.members), seconds=4.0))
            for start, crew in enumerate([two, three, another])
        ]
        assert together(crews, lambda crew, one: inject(crew, one, suffer, 2.0, RING)) == len(drawn)


@needs_native
def test_shared_memory_inside_two_hosts_at_random_moments(rng: random.Random) -> None:
    drawn = faults(rng, 0.125, USUAL)
    with Crew(4, num_hosts=2) as four, Crew(4, num_hosts=2) as another:
        crews = [
            (crew, draw(rng, "fault", drawn[start::2], 4, seconds=4.0))
            for start, crew in enumerate([four, another])
        ]
        assert together(crews, lambda crew, one: inject(crew, one, suffer, 4.0, AUTO)) == len(drawn)


def test_training_at_random_moments(rng: random.Random) -> None:
    drawn = faults(rng, 0.2, {**USUAL, Fault.KILLED: 0.3, Fault.LEAVES: 0.1})

    def run(crew: Crew, one: Injection) -> None:
        num_replicas, implementation = jobs[crew]
        inject(crew, one, train, 2.0, Job(free_port(), num_replicas, implementation))

    with Crew(2) as two, Crew(3) as three, Crew(2) as over_gloo:
        jobs = {two: (2, AUTO), three: (1, AUTO), over_gloo: (1, RING)}
        crews = [
            (crew, draw(rng, "fault", drawn[start::3], len(crew.members), seconds=4.0))
            for start, crew in enumerate(jobs)
        ]
        assert together(crews, run) == len(drawn)
