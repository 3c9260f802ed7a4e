"""How long a rank waits for the word of rank 0, whose end of the line the tests hold."""

from __future__ import annotations

import gc
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
from torch._C._distributed_c10d import HashStore

from unisono.communicators import watch as watches
from unisono.communicators.headers import Header
from unisono.communicators.lines import Lines
from unisono.communicators.watch import Watch
from unisono.errors import CommunicationError, WorkerLostError

SECONDS = 120.0


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    own, of_rank_0 = socket.socketpair()
    monkeypatch.setattr(watches, "join_star", lambda *_, **__: {0: own})
    monkeypatch.setattr(watches, "_GRACE_SECONDS", 0.1)
    with of_rank_0:
        made = Watch(HashStore(), 1, 2, timeout_seconds=SECONDS)
        yield made
        made.close()


def fail(watch: Watch) -> None:
    with watch.collective(Header("barrier", watch.sequence + 1)):
        raise WorkerLostError("Rank 0 does not answer.", [0])


def test_a_silent_rank_0_is_awaited_no_longer_than_the_collective_may_take(watch: Watch) -> None:
    # A wait of an earlier collective, which had more time.
    watch.wait(lambda _: True)
    watch.timeout_seconds = 0.1
    start = time.monotonic()

    with pytest.raises(CommunicationError, match="Rank 0, which decides"):
        fail(watch)
    assert time.monotonic() - start < SECONDS / 2


def test_what_has_failed_is_known_after_the_end(watch: Watch) -> None:
    assert not watch.has_failed
    watch.timeout_seconds = 0.1
    with pytest.raises(CommunicationError):
        fail(watch)
    watch.close()

    assert watch.has_failed
    assert watch.failure is None


def test_an_error_is_raised_whole_while_another_thread_closes(watch: Watch) -> None:
    errors = [WorkerLostError("rank 1 has ended"), None]

    class Closes(Watch):
        """Another thread closes it after the first look."""

        _failure = property(lambda _: errors.pop(0), lambda *_: None)

    watch.__class__ = Closes

    with pytest.raises(WorkerLostError, match="rank 1"):
        watch.raise_failure()
    watch.__class__ = Watch


@pytest.mark.parametrize("call", [Watch.raise_failure, Watch.check_health])
def test_what_a_caller_used_is_free_when_its_error_is(
    watch: Watch, call: Callable[[Watch], None]
) -> None:
    class Used:
        pass

    def use() -> weakref.ref[Used]:
        used = Used()
        found = weakref.ref(used)
        try:
            call(watch)
        except WorkerLostError:
            return found
        raise AssertionError("no error")

    watch._failure = WorkerLostError("rank 0 has ended")
    gc.disable()
    try:
        found = use()
        watch.close()
        assert found() is None
    finally:
        gc.enable()


def test_rank_0_can_answer_before_it_knows_that_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    own, of_rank_1 = socket.socketpair()
    start = Lines.start

    def slow(self: Lines) -> None:
        start(self)
        time.sleep(0.2)

    monkeypatch.setattr(watches, "join_star", lambda *_, **__: {1: own})
    monkeypatch.setattr(Lines, "start", slow)
    with of_rank_1:
        # Hears that a connection broke, and asks all ranks what they do.
        of_rank_1.sendall(b'["broke", 1, null, 0, "reset"]\n["does", 1, null]\n')
        watch = Watch(HashStore(), 0, 2, timeout_seconds=SECONDS)

        with pytest.raises(CommunicationError, match="reset"):
            watch.wait(threading.Event().wait)
        watch.close()
