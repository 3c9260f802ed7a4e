"""The thread that calls MPI while the program does not."""

from __future__ import annotations

import threading
import time

from unisono.communicators.mpi import Progress


def test_it_calls_again_and_again_if_the_program_does_not() -> None:
    called = threading.Semaphore(0)
    progress = Progress(called.release)

    progress.start()

    assert all(called.acquire(timeout=10) for _ in range(5))
    progress._stop()
    assert not any(one.name == "unisono MPI" for one in threading.enumerate())


def test_it_does_not_call_while_the_program_does() -> None:
    times: list[float] = []
    progress = Progress(lambda: times.append(time.monotonic()))
    progress.start()

    # The thread may look twice between two calls only if this thread is kept from running.
    for _ in range(200):
        progress.num_calls += 1
        time.sleep(1e-3)
    calls_meanwhile = len(times)

    deadline = time.monotonic() + 10
    while len(times) == calls_meanwhile and time.monotonic() < deadline:
        time.sleep(1e-3)
    progress._stop()
    assert calls_meanwhile < 40
    assert len(times) > calls_meanwhile


def test_many_threads_start_it_once() -> None:
    progress = Progress(lambda: None)
    starters = [threading.Thread(target=progress.start) for _ in range(8)]

    for one in starters:
        one.start()
    for one in starters:
        one.join()

    assert sum(one.name == "unisono MPI" for one in threading.enumerate()) == 1
    progress._stop()
