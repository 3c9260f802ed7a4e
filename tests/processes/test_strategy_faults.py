"""What a training program sees when workers fail, and that it can go on in the same process."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from keyboard import press_ctrl_c_in
from torch._C._distributed_c10d import Store

import unisono as uo
from processes.harness import Outcome, Ranks, outcome, run_ranks
from processes.leftovers import extra_threads
from processes.namespaces import enter, make_hosts
from processes.ports import free_port
from processes.training_faults import Job, Training
from unisono.cluster_resolver import ClusterSpec, SimpleClusterResolver
from unisono.experimental import CommunicationImplementation, CommunicationOptions

AUTO, RING = CommunicationImplementation.AUTO, CommunicationImplementation.RING
SECONDS = 120.0
# The watch sees a dead process within two seconds. The rest is for a busy machine.
SLACK = 50.0


def train_for_ever(training: Training) -> None:
    while True:
        training.step()


def lose_one(_: Store, rank: int, size: int, jobs: list[Job], lost: int) -> tuple[Outcome, float]:
    """Trains until `lost` is killed, then with the others alone, all in one process."""
    strategy = jobs[0].join(rank, size, SECONDS)
    training = Training(strategy)
    for _step in range(2):
        training.step()
    if rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    raised = outcome(lambda: train_for_ever(training))
    strategy.close()
    strategy = jobs[1].join(rank - (rank > lost), size - 1, SECONDS)
    training = Training(strategy)
    losses = [training.step() for _ in range(10)]
    strategy.close()
    assert losses[-1] < losses[0]
    return raised, losses[-1]


@pytest.mark.parametrize(("implementation", "lost"), [(AUTO, 0), (AUTO, 2), (RING, 0)])
def test_survivors_train_on_in_a_smaller_cluster(
    implementation: CommunicationImplementation, lost: int
) -> None:
    jobs = [Job(free_port(), 1, implementation) for _ in range(2)]
    with Ranks(3, lose_one, jobs, lost) as ranks:
        results = ranks.results()

    assert sorted(results) == [rank for rank in range(3) if rank != lost]
    for (kind, message, at_fault, seconds), _ in results.values():
        assert kind == "WorkerLostError"
        assert at_fault == (lost,), message
        assert seconds < 2 + SLACK
    assert len({loss for _, loss in results.values()}) == 1


def outlive(store: Store, rank: int, size: int, job: Job) -> float | None:
    """Trains, and again when another process has the place and the address of rank 0."""
    strategy = job.join(rank, size, SECONDS)
    Training(strategy).step()
    store.set(f"trained/{rank}", "")
    if rank == 0:
        time.sleep(600)
    store.wait(["ended"], timedelta(seconds=60))
    strategy.close()
    return come_again(store, rank, size, job)


def come_again(_: Store, rank: int, size: int, job: Job) -> float:
    strategy = job.join(rank, size, SECONDS)
    loss = Training(strategy).step()
    strategy.close()
    return loss


def test_a_coordinator_that_is_started_again_finds_the_survivors() -> None:
    job = Job(free_port(), 1, AUTO)
    with Ranks(2, outlive, job) as ranks:
        ranks.store.wait(["trained/0", "trained/1"], timedelta(seconds=60))
        ranks.processes[0].kill()
        ranks.processes[0].join()
        ranks.store.set("ended", "")
        with Ranks(2, come_again, job, skip=(1,)) as others:
            first = others.results()
            second = ranks.results(of=(1,))

    assert first[0] == second[1]


def come_late(store: Store, rank: int, size: int, job: Job) -> float:
    """Rank 0 waits for rank 1 in vain, twice; then both come, and once more."""
    if rank == 0:
        for _ in range(2):
            assert outcome(lambda: job.join(rank, size, 0.5))[0] == "WorkerTimeoutError"
        store.set("waited in vain", "")
    store.wait(["waited in vain"], timedelta(seconds=60))
    come_again(store, rank, size, job)
    return come_again(store, rank, size, job)


def test_a_worker_that_missed_a_meeting_comes_to_the_next() -> None:
    first, second = run_ranks(2, come_late, Job(free_port(), 1, AUTO))

    assert first == second


def come_after_a_stranger(store: Store, rank: int, size: int, job: Job) -> float | None:
    """The stranger calls itself rank 1, too."""
    if rank == 2:
        os.environ["UNISONO_JOB_TOKEN"] = "another"
        kind, *_ = outcome(lambda: job.join(1, size - 1, SECONDS))
        store.set("refused", "")
        assert kind == "JobMismatchError"
        return None
    if rank == 1:
        store.wait(["refused"], timedelta(seconds=60))
    return come_again(store, rank, size - 1, job)


def test_a_worker_of_another_job_takes_nobodys_place() -> None:
    first, second, _ = run_ranks(3, come_after_a_stranger, Job(free_port(), 1, AUTO))

    assert first == second


def ask_until_it_fails(strategy: uo.Strategy) -> None:
    """The end of a worker is known a moment later, on a busy machine a long one."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        strategy.check_health()
        time.sleep(0.05)


def ask_for_health(_: Store, rank: int, size: int, job: Job) -> Outcome:
    strategy = job.join(rank, size, SECONDS)
    strategy.check_health()
    Training(strategy).step()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raised = outcome(functools.partial(ask_until_it_fails, strategy))
    strategy.close()
    return raised


@pytest.mark.parametrize("implementation", [AUTO, RING])
def test_health_is_answered_before_any_collective(
    implementation: CommunicationImplementation,
) -> None:
    with Ranks(3, ask_for_health, Job(free_port(), 1, implementation)) as ranks:
        results = ranks.results()

    assert sorted(results) == [0, 2]
    for kind, message, at_fault, seconds in results.values():
        assert (kind, at_fault) == ("WorkerLostError", (1,)), message
        assert seconds < 2 + SLACK


def interrupt(store: Store, rank: int, size: int, job: Job) -> float:
    strategy = job.join(rank, size, 2 * SECONDS)
    training = Training(strategy)
    training.step()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    start = time.monotonic()
    press_ctrl_c_in(lambda: train_for_ever(training), after=1.0)
    strategy.close()
    return time.monotonic() - start


@pytest.mark.parametrize(("implementation", "num_replicas"), [(AUTO, 2), (RING, 1)])
def test_ctrl_c_ends_a_wait_for_a_stopped_worker(
    implementation: CommunicationImplementation, num_replicas: int
) -> None:
    with Ranks(2, interrupt, Job(free_port(), num_replicas, implementation)) as ranks:
        results = ranks.results(of=(0,))

    assert results[0] < 1 + 3 + SLACK


def start_wrongly(_: Store, rank: int, size: int, port: int, folder: str, what: str) -> Outcome:
    import sys

    script = Path(folder, f"{rank if what == 'script' else 0}.py")
    script.touch()
    sys.argv = [str(script)]
    os.environ["UNISONO_JOB_TOKEN"] = str(rank) if what == "token" else ""
    own_size = size + (what == "size" and rank == 1)
    return outcome(lambda: Job(port, 1, AUTO).join(rank, own_size, 12.0))


def test_another_script_is_told_to_every_worker(tmp_path: Path) -> None:
    for kind, message, at_fault, seconds in run_ranks(
        2, start_wrongly, free_port(), str(tmp_path), "script"
    ):
        assert kind == "JobMismatchError"
        assert "rank 0" in message
        assert "rank 1" in message
        assert at_fault == (1,)
        assert seconds < 12 + SLACK


# A cluster of another size is the cluster of another job.
@pytest.mark.parametrize("what", ["token", "size"])
def test_another_token_or_cluster_is_refused_and_named(what: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, start_wrongly, free_port(), str(tmp_path), what)

    assert (first[0], first[2]) == ("WorkerTimeoutError", (1,))
    assert "was refused" in first[1]
    assert (second[0], second[2]) == ("JobMismatchError", (1,))
    assert first[3] < 12 + SLACK


def lose_the_network(
    store: Store, rank: int, size: int, names: list[str]
) -> tuple[Outcome, float, int]:
    threads = threading.active_count()
    enter(names[rank * len(names) // size])
    hosts = ["10.83.0.1", "10.83.0.1", "10.83.0.2", "10.83.0.2"]
    spec = ClusterSpec({"worker": [f"{host}:{2222 + i}" for i, host in enumerate(hosts)]})
    strategy = uo.MultiWorkerMirroredStrategy(
        SimpleClusterResolver(spec, task_type="worker", task_id=rank),
        CommunicationOptions(timeout_seconds=12),
        devices=["cpu:0"],
    )
    training = Training(strategy)
    training.step()
    store.set(f"ready/{rank}", "")
    raised = outcome(lambda: train_for_ever(training))
    start = time.monotonic()
    strategy.close()
    seconds_to_close = time.monotonic() - start
    # The store stays for those who join again.
    left = extra_threads(threads, but="unisono store")
    # The coordinator ends last, so that the others hear what happened.
    store.set(f"closed/{rank}", "")
    store.wait([f"closed/{other}" for other in range(size)], timedelta(seconds=60))
    return raised, seconds_to_close, left


def test_a_cut_cable_ends_the_training_on_both_sides() -> None:
    with make_hosts(2) as hosts, Ranks(4, lose_the_network, hosts.names) as ranks:
        ranks.store.wait([f"ready/{rank}" for rank in range(4)], timedelta(seconds=60))
        time.sleep(0.3)
        hosts.cut(1)
        results = ranks.results()

    for rank, ((kind, message, at_fault, _), seconds_to_close, left) in results.items():
        assert kind in ("WorkerLostError", "WorkerTimeoutError")
        assert set(at_fault) <= ({2, 3} if rank < 2 else {0}), message
        assert at_fault, message
        assert seconds_to_close < 4 + SLACK
        assert left == 0
