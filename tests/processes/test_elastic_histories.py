"""Elastic jobs with random histories end with the bits of jobs that lose nobody.

`UNISONO_HISTORIES` sets how many there are, 6 by default, and `UNISONO_HISTORY_SEED` the seed of
the first one. A failure prints the seed of its history.
"""

from __future__ import annotations

import os

import pytest

from processes.crew import Crew
from processes.elastic_histories import MOST_WORKERS, History, play
from processes.namespaces import Hosts, make_hosts

NUM_HISTORIES = int(os.environ.get("UNISONO_HISTORIES", "6"))
FIRST_SEED = int(os.environ.get("UNISONO_HISTORY_SEED", "0"))
SECONDS_FOR_ONE = 30.0

pytestmark = pytest.mark.timeout(200 + SECONDS_FOR_ONE * NUM_HISTORIES)


def play_all(seeds: range, num_hosts: int, hosts: Hosts | None = None) -> None:
    """Plays histories one after the other, in processes that go on after each of them."""
    failures = []
    # The last member trains undisturbed.
    with Crew(MOST_WORKERS + 1) as crew:
        for seed in seeds:
            try:
                num_late = play(crew, History.drawn(seed, num_hosts), hosts)
                print(f"seed {seed} is well; {num_late} came too late", flush=True)
            except AssertionError as error:
                failures.append(f"seed {seed}: {error}")
                print(failures[-1], flush=True)
    assert not failures, "\n\n".join(failures)


def test_histories_on_one_host() -> None:
    play_all(range(FIRST_SEED, FIRST_SEED + NUM_HISTORIES * 2 // 3), 1)


def test_histories_on_two_hosts() -> None:
    with make_hosts(2) as hosts:
        play_all(range(FIRST_SEED + NUM_HISTORIES * 2 // 3, FIRST_SEED + NUM_HISTORIES), 2, hosts)
