"""What the ranks say when one of them is lost, late, or does something else."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from processes.harness import Ranks, run_ranks
from torch._C._distributed_c10d import Store

from unisono.communicators.communicator import Communicator
from unisono.errors import (
    UnequalCollectivesError,
    WorkerLostError,
    WorkerTimeoutError,
)
from unisono.kernels import native_core
from unisono.options import ReduceOp
from unit.communicators.shared_ranks import TIMEOUT, Report, join, kill, report

pytestmark = pytest.mark.skipif(
    native_core().kernel is None, reason=f"needs the native core: {native_core().status}"
)
CLONE_NEWPID = 0x20000000
# The watch sees a process that has ended within two. The rest is for a busy machine.
SECONDS_TO_NOTICE = 100.0


def num_segments() -> int:
    """How many descriptors of shared memory this process has."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        # The one that lists them is closed by now.
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum("memfd:unisono" in name for name in names)


def wait_for_lost_rank(
    store: Store, rank: int, size: int, end: str, can_allocate: bool
) -> tuple[Report, Report, float]:
    with join(store, rank, size, can_allocate=can_allocate) as communicator:
        communicator.all_reduce(ReduceOp.SUM, [torch.ones(3)])
        assert num_segments() == can_allocate
        if rank == 1:
            # A child has the memory, too, and outlives its parent.
            if os.fork() == 0:
                os.closerange(3, 1000)
                time.sleep(10)
                os._exit(0)
            if end == "exec":
                for descriptor in map(int, os.listdir("/proc/self/fd")):
                    with contextlib.suppress(OSError):
                        os.set_inheritable(descriptor, False)
                os.execl(sys.executable, "python", "-c", "import time; time.sleep(600)")
            os.kill(os.getpid(), signal.SIGKILL)
        tensor = torch.ones(4, 3)
        first = report(lambda: communicator.all_reduce(ReduceOp.MAX, [tensor]))
        again = report(communicator.barrier)
    survivor = rank - (rank > 1)
    with join(store, survivor, size - 1, key="second") as communicator:
        tensor = torch.ones(1)
        communicator.all_reduce(ReduceOp.SUM, [tensor])
    return first, again, tensor.item()


@pytest.mark.parametrize(
    ("size", "end", "can_allocate"),
    [(2, "kill", True), (2, "kill", False), (3, "exec", False), (4, "exec", True)],
)
def test_a_rank_that_ends_is_named_long_before_the_timeout(
    size: int, end: str, can_allocate: bool
) -> None:
    with Ranks(size, wait_for_lost_rank, end, can_allocate) as ranks:
        results = ranks.results()

    assert sorted(results) == [rank for rank in range(size) if rank != 1]
    for first, again, total in results.values():
        assert first.kind is WorkerLostError
        assert first.ranks == (1,)
        assert first.seconds < SECONDS_TO_NOTICE
        assert "all_reduce(max) of float32[4, 3]" in first.text
        assert "had finished call 1, all_reduce(sum) of float32[3]" in first.text
        assert again.text == first.text
        assert again.seconds < SECONDS_TO_NOTICE
        assert total == size - 1
    assert len({first.text for first, _, _ in results.values()}) == 1


def join_from_a_pid_namespace(store: Store, rank: int, size: int) -> tuple[Report, int] | None:
    if rank == 1:
        # Its children are in a new namespace, and `/proc` shows the old one.
        assert ctypes.CDLL(None).unshare(CLONE_NEWPID) == 0
        if (child := os.fork()) != 0:
            os.waitpid(child, 0)
            return None
    communicator = join(store, rank, size, can_allocate=False)
    if rank == 1:
        os._exit(0)
    return report(communicator.barrier), num_segments()


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(
        ["unshare", "--pid", "--fork", "true"], check=False, capture_output=True
    ).returncode
    != 0,
    reason="must not make pid namespaces",
)
def test_ranks_that_do_not_see_each_other_keep_the_descriptor() -> None:
    told, num_kept = run_ranks(2, join_from_a_pid_namespace)[0]

    assert (told.kind, told.ranks, num_kept) == (WorkerLostError, (1,), 1)


def reduce_for_ever(store: Store, rank: int, size: int, num_elements: int) -> Report:
    communicator = join(store, rank, size)
    tensor = communicator.allocate(4 * num_elements).view(torch.float32)
    others = torch.ones(num_elements)

    def reduce() -> None:
        while True:
            communicator.all_reduce(ReduceOp.SUM, [tensor])
            communicator.all_reduce(ReduceOp.SUM, [others])
            store.set("ready", "")

    return report(reduce)


@pytest.mark.parametrize(("size", "num_elements"), [(2, 2_000_000), (3, 1)])
def test_a_rank_killed_in_a_collective_is_noticed(size: int, num_elements: int) -> None:
    with Ranks(size, reduce_for_ever, num_elements) as ranks:
        ranks.store.wait(["ready"])
        time.sleep(0.05)
        kill(ranks, size - 1, signal.SIGKILL)
        began = time.monotonic()
        results = ranks.results()
        seconds = time.monotonic() - began

    assert seconds < SECONDS_TO_NOTICE
    assert {(r.kind, r.ranks) for r in results.values()} == {(WorkerLostError, (size - 1,))}


def wait_for_stopped_rank(store: Store, rank: int, size: int) -> Report:
    communicator = join(store, rank, size, timeout_seconds=12, joining_seconds=TIMEOUT)
    if rank == 1:
        store.set("ready", "")
        time.sleep(600)
    store.wait(["stopped"], timedelta(seconds=TIMEOUT))
    return report(communicator.barrier)


def test_a_stopped_rank_is_named_after_the_timeout() -> None:
    with Ranks(3, wait_for_stopped_rank) as ranks:
        ranks.store.wait(["ready"])
        kill(ranks, 1, signal.SIGSTOP)
        ranks.store.set("stopped", "")
        results = ranks.results(of=(0, 2))

    assert sorted(results) == [0, 2]
    for result in results.values():
        assert result.kind is WorkerTimeoutError
        assert result.ranks == (1,)
        assert "stopped by a signal" in result.text
        assert "waited 12 s for rank 1" in result.text
        assert 11 < result.seconds < 12 + SECONDS_TO_NOTICE


def fail_while_leading(store: Store, rank: int, size: int) -> Report:
    def work(_: object) -> None:
        raise ValueError("of the program")

    with join(store, rank, size) as communicator:
        lead = functools.partial(communicator.lead, bytes(16), [torch.ones(3)], work)
        if rank > 0:
            return report(lead)
        with pytest.raises(ValueError, match="of the program"):
            lead()
        return report(communicator.barrier)


def test_a_rank_that_fails_for_all_is_named() -> None:
    for result in run_ranks(3, fail_while_leading):
        assert result.kind is WorkerLostError
        assert result.ranks == (0,)
        assert result.seconds < SECONDS_TO_NOTICE


CALLS: dict[str, Callable[[Communicator], object]] = {
    "sum": lambda c: c.all_reduce(ReduceOp.SUM, [torch.ones(4)]),
    "another shape": lambda c: c.all_reduce(ReduceOp.SUM, [torch.ones(2, 2)]),
    "another length": lambda c: c.all_reduce(ReduceOp.SUM, [torch.ones(1_000_000)]),
    "another dtype": lambda c: c.all_reduce(ReduceOp.SUM, [torch.ones(4, dtype=torch.int32)]),
    "another operation": lambda c: c.all_reduce(ReduceOp.MAX, [torch.ones(4)]),
    "another divisor": lambda c: c.all_reduce(ReduceOp.MEAN, [torch.ones(4)], 7),
    "more terms": lambda c: c.all_reduce(ReduceOp.SUM, [torch.ones(4), torch.ones(4)]),
    "in the arena": lambda c: c.allocate(7),
    "another collective": lambda c: c.barrier(),
    "gather": lambda c: c.all_gather(torch.ones(4)),
    "broadcast": lambda c: c.broadcast(torch.ones(4), 0),
}
WORDS = {
    "sum": "all_reduce(sum) of float32[4]",
    "another shape": "all_reduce(sum) of float32[2, 2]",
    "another length": "all_reduce(sum) of float32[1000000]",
    "another dtype": "all_reduce(sum) of int32[4]",
    "another operation": "all_reduce(max) of float32[4]",
    "another divisor": "all_reduce(mean over 7) of float32[4]",
    "more terms": "all_reduce(sum) of 2 times float32[4]",
    "in the arena": "allocate of 7 bytes",
    "another collective": "barrier",
    "gather": "all_gather of float32[4]",
    "broadcast": "broadcast(root 0) of float32[4]",
}


def call_differently(store: Store, rank: int, size: int) -> dict[str, Report]:
    reports = {}
    for other in [name for name in CALLS if name != "sum"]:
        with join(store, rank, size, key=other) as communicator:
            communicator.barrier()
            call = CALLS[other if rank == 1 else "sum"]
            reports[other] = report(functools.partial(call, communicator))
    return reports


@pytest.mark.parametrize("size", [2, 3])
def test_different_calls_are_an_error_on_every_rank(size: int) -> None:
    by_rank = run_ranks(size, call_differently)

    for other, first in by_rank[0].items():
        for reports in by_rank:
            each = reports[other]
            assert each.kind is UnequalCollectivesError
            assert each.ranks == tuple(range(size))
            assert each.seconds < SECONDS_TO_NOTICE
            assert f"rank 1 makes {WORDS[other]}" in each.text
            assert WORDS["sum"] in each.text
            assert each.text == first.text


def leave_early(store: Store, rank: int, size: int) -> Report | None:
    with join(store, rank, size) as communicator:
        communicator.barrier()
        if rank == 1:
            return None
        report(communicator.barrier)
        return report(communicator.check_health)


def test_a_rank_that_closes_is_lost_to_the_others() -> None:
    result, _ = run_ranks(2, leave_early)

    assert result.kind is WorkerLostError
    assert result.ranks == (1,)
    assert "has closed its communicator" in result.text


def close_beside_a_collective(store: Store, rank: int, size: int) -> Report:
    communicator = join(store, rank, size)
    communicator.barrier()
    if rank == 0:
        has_begun = threading.Event()

        def broadcast() -> None:
            has_begun.set()
            communicator.broadcast(torch.ones(3))

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(report, broadcast)
            has_begun.wait(TIMEOUT)
            time.sleep(1.0)
            communicator.close()
            store.set("closed", "")
            return waiting.result()
    # Or, on a busy machine, it might make another call than rank 0 before that one closes.
    store.wait(["closed"], timedelta(seconds=TIMEOUT))
    return report(communicator.barrier)


def test_what_a_rank_that_closed_was_in_is_told() -> None:
    for result in run_ranks(2, close_beside_a_collective):
        assert result.kind is WorkerLostError
        assert result.ranks == (0,)
        assert "Rank 0 was in call 2, broadcast(root 0) of float32[3], and closed" in result.text


def start(store: Store, rank: int, size: int) -> Report:
    return report(lambda: join(store, rank, size, timeout_seconds=12))


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_never_starts_is_named(missing: int) -> None:
    with Ranks(3, start, skip=(missing,)) as ranks:
        results = ranks.results()

    for result in results.values():
        assert result.kind is WorkerTimeoutError
        assert result.ranks == (missing,)
        assert f"rank {missing}" in result.text
        assert result.seconds < 12 + SECONDS_TO_NOTICE


def wait_for_interrupt(store: Store, rank: int, size: int) -> Report:
    with join(store, rank, size) as communicator:
        if rank == 1:
            store.wait(["interrupted"], timedelta(seconds=TIMEOUT))
            return report(communicator.barrier)

        def wait() -> None:
            store.set("ready", "")
            communicator.barrier()

        found = report(wait)
        store.set("interrupted", "")
        return found


def test_ctrl_c_ends_the_wait_and_the_others_hear_of_it() -> None:
    with Ranks(2, wait_for_interrupt) as ranks:
        ranks.store.wait(["ready"])
        time.sleep(1.0)
        kill(ranks, 0, signal.SIGINT)
        results = ranks.results()

    assert results[0].kind is KeyboardInterrupt
    assert results[0].seconds < SECONDS_TO_NOTICE
    assert results[1].kind is WorkerLostError
    assert results[1].ranks == (0,)
    assert "Rank 0 gave up in barrier" in results[1].text
