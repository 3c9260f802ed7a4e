"""Elastic jobs with random histories end with the bits of jobs that lose nobody.

`UNISONO_HISTORIES` sets how many there are, two thirds of them on one host, and
`UNISONO_HISTORY_SEED` the seed of the first one. A failure prints the seed of its history.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence

import pytest

from processes.crew import Crew
from processes.elastic_histories import play
from processes.elastic_history import Event, History
from processes.elastic_programs import Program
from processes.namespaces import Hosts, make_hosts
from unisono.experimental import CommunicationImplementation

NUM_HISTORIES = int(os.environ.get("UNISONO_HISTORIES", "0"))
FIRST_SEED = int(os.environ.get("UNISONO_HISTORY_SEED", "0"))
ALL_SEEDS = range(FIRST_SEED, FIRST_SEED + NUM_HISTORIES)
ON_ONE_HOST = ALL_SEEDS[: NUM_HISTORIES * 2 // 3]
# Short ones that have everything together: kills at all points of a run, also while a state is
# handed over, pauses, preemptions, joins, and all kinds of programs.
USUAL = (2197, 768, 1964, 2992, 1739, 2524, 1870, 1082, 2641, 2879, 1136, 206, 2080)
# Also cuts. That of the last one is so long that workers are given up.
USUAL_ON_TWO_HOSTS = (1105, 323, 1516, 77, 1082, 520, 2278)
SECONDS_FOR_ONE = 30.0

pytestmark = pytest.mark.timeout(400 + SECONDS_FOR_ONE * NUM_HISTORIES)


def play_all(seeds: Sequence[int], num_hosts: int, hosts: Hosts | None = None) -> None:
    """Plays histories one after the other, in processes that go on after each of them."""
    failures = []
    histories = {seed: History.drawn(seed, num_hosts) for seed in seeds}
    # One may join, and the last member trains undisturbed.
    most = max(history.num_workers for history in histories.values())
    with Crew(most + 2) as crew:
        for seed, history in histories.items():
            try:
                start = time.monotonic()
                told, _ = play(crew, history, hosts)
                print(f"seed {seed} is well: {told} ({time.monotonic() - start:.1f} s)", flush=True)
            except AssertionError as error:
                failures.append(f"seed {seed}: {error}")
                print(failures[-1], flush=True)
    assert not failures, "\n\n".join(failures)


def test_histories_on_one_host() -> None:
    play_all(ON_ONE_HOST if NUM_HISTORIES else USUAL, 1)


def test_histories_on_two_hosts() -> None:
    with make_hosts(2) as hosts:
        seeds = ALL_SEEDS[len(ON_ONE_HOST) :] if NUM_HISTORIES else USUAL_ON_TWO_HOSTS
        play_all(seeds, 2, hosts)


def test_one_epoch_with_1_then_4_then_2_then_3_workers() -> None:
    program = Program(
        seed=7,
        num_replicas=4,
        model="perceptron",
        optimizer="Adam",
        schedule="steps",
        clipping="norm",
        extra="nothing",
        is_batch_norm_synchronized=False,
        evaluates=False,
        num_samples=96,
        batch_size=8,
        num_epochs=1,
    )
    events = (
        Event("join", 1, 1),
        Event("join", 2, 2),
        Event("join", 3, 3),
        Event("kill", 0, 5, "in the backward pass"),
        Event("kill", 2, 7, "after the backward pass"),
        Event("join", 4, 9),
    )
    history = History(7, 1, program, CommunicationImplementation.AUTO, events, places=(0,) * 5)
    with Crew(6) as crew:
        _, results = play(crew, history)

    trails = {worker: outcome.trail for worker, outcome in results.items()}
    assert {worker for worker, one in results.items() if one.found is not None} == {1, 3, 4}
    counts = [len(members) for _, members in sorted(trails[1].items())]
    assert [count for count, _ in itertools.groupby(counts)] == [2, 3, 4, 3, 2, 3]
