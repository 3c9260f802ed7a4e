import _imp
import sys
import threading

import pytest

from unisono.engines.guard import Guard, ReplicaStopped


def test_a_replica_that_is_stopped_in_an_import_keeps_no_lock_that_others_need() -> None:
    guard = Guard()

    def stopped() -> None:
        guard.expose()
        try:
            # What `import` does first.
            _imp.acquire_lock()
            guard.stop()
            for _ in range(1000):
                pass
        except ReplicaStopped:
            guard.cover_surely()

    thread = threading.Thread(target=stopped)
    thread.start()
    thread.join()

    assert not _imp.lock_held()


def test_the_import_lock_of_another_thread_stays_taken() -> None:
    guard = Guard()
    guard.expose()
    is_taken, is_done = threading.Event(), threading.Event()

    def take() -> None:
        _imp.acquire_lock()
        is_taken.set()
        is_done.wait(60)
        _imp.release_lock()

    thread = threading.Thread(target=take)
    thread.start()
    is_taken.wait(60)
    try:
        guard.cover_surely()
        assert _imp.lock_held()
    finally:
        is_done.set()
        thread.join()


def test_a_stop_before_user_code_is_raised_when_it_begins() -> None:
    guard = Guard()
    guard.stop()

    with pytest.raises(ReplicaStopped):
        guard.expose()


def test_a_profiler_works_after_a_stop() -> None:
    guard = Guard()
    stop = threading.Thread(target=guard.stop)
    with pytest.raises(ReplicaStopped):
        guard.expose()
        stop.start()
        stop.join()
    with pytest.raises(ReplicaStopped):
        guard.cover()
    seen: list[str] = []
    sys.setprofile(lambda frame, event, arg: seen.append(event))
    try:
        guard.__class__()
    finally:
        sys.setprofile(None)
    assert "call" in seen
