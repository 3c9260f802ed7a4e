"""How long a rank waits for the word of rank 0, whose end of the line the tests hold."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import HashStore

from unisono.communicators import watch as watches
from unisono.communicators.headers import Header
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
