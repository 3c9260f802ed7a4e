"""Memory that is shared with those who are invited, and nobody else."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from torch._C._distributed_c10d import HashStore

from unisono.communicators.segment import Host, receive_segment
from unisono.errors import (
    CommunicationError,
    JobMismatchError,
    WorkerLostError,
    WorkerTimeoutError,
)
from unisono.system import create_segment


class Entered:
    """A rank with the memory."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def close(self) -> None:
        os.close(self.fd)


def cannot_enter(fd: int) -> Entered:
    os.close(fd)
    raise OSError(12, "Cannot allocate memory")


@pytest.fixture
def segment() -> Iterator[int]:
    fd = create_segment(4096)
    yield fd
    os.close(fd)


def receive(store: HashStore, rank: int = 1, size: int = 2) -> Entered:
    return receive_segment(store, "key", rank, size, 10, Entered)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def hand_out(
    threads: ThreadPoolExecutor,
    store: HashStore,
    segment: int,
    timeout_seconds: float = 60,
    size: int = 2,
) -> Future[None]:
    host = Host(store, "key", size)
    return threads.submit(host.hand_out, segment, timeout_seconds, lambda: None)


def test_a_segment_is_private_and_only_grows(segment: int) -> None:
    assert os.fstat(segment).st_mode & 0o777 == 0o600
    os.ftruncate(segment, 8192)
    with pytest.raises(PermissionError):
        os.ftruncate(segment, 0)


def test_a_guest_receives_the_same_memory(threads: ThreadPoolExecutor, segment: int) -> None:
    store = HashStore()
    handed_out = hand_out(threads, store, segment)

    entered = receive(store)
    handed_out.result(60)

    assert os.fstat(entered.fd).st_ino == os.fstat(segment).st_ino
    assert not store.check(["key"])
    entered.close()


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"[]",
        b"{",
        b'{"token": "wrong", "rank": 1, "size": 2}',
        '{"token": "\u00e9"}'.encode(),
        b"[" * 4096,
        b"\xff",
    ],
)
def test_a_stranger_receives_nothing(
    threads: ThreadPoolExecutor, segment: int, message: bytes
) -> None:
    store = HashStore()
    handed_out = hand_out(threads, store, segment)
    address = json.loads(store.get("key"))["address"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(f"\0{address}")
        stranger.send(message)

        assert stranger.recv(4096) == b""

    receive(store).close()
    handed_out.result(60)


# Comes as another user, and prints what it hears before it has said more than it was asked to.
NOBODY = """
import os, socket, sys
os.setuid(65534)
stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
stranger.settimeout(30)
stranger.connect("\\0" + sys.argv[1])
try:
    if sys.argv[2]:
        stranger.send(sys.argv[2].encode())
    print(stranger.recv(4096))
except ConnectionError:
    print(b"")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("knows_the_secret", [False, True])
def test_another_user_is_not_even_listened_to(
    threads: ThreadPoolExecutor, segment: int, knows_the_secret: bool
) -> None:
    store = HashStore()
    handed_out = hand_out(threads, store, segment, timeout_seconds=60)
    invitation = json.loads(store.get("key"))
    request = json.dumps({"token": invitation["token"], "rank": 1, "size": 2})
    command = [sys.executable, "-I", "-S", "-c", NOBODY, invitation["address"]]

    told = subprocess.run(
        [*command, request if knows_the_secret else ""], capture_output=True, timeout=60, check=True
    )

    assert told.stdout.strip() == b"b''"
    receive(store).close()
    handed_out.result(60)


def test_silent_guests_keep_nobody_waiting(threads: ThreadPoolExecutor, segment: int) -> None:
    store = HashStore()
    handed_out = hand_out(threads, store, segment)
    address = json.loads(store.get("key"))["address"]
    with ExitStack() as stack:
        for _ in range(50):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            silent.connect(f"\0{address}")
        receive(store).close()
        handed_out.result(60)


def test_a_rank_without_memory_is_told_to_all(segment: int) -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        handed_out = hand_out(threads, store, segment, size=3)
        other = threads.submit(receive, store, 1, 3)
        with pytest.raises(CommunicationError, match=r"Rank 2 cannot share memory.*ulimit"):
            receive_segment(store, "key", 2, 3, 10, cannot_enter)
        for one in (handed_out, other):
            with pytest.raises(CommunicationError, match="Rank 2 cannot share memory") as raised:
                one.result(60)
            assert raised.value.ranks == (2,)


def test_a_guest_of_another_job_is_told(threads: ThreadPoolExecutor, segment: int) -> None:
    store = HashStore()
    handed_out = hand_out(threads, store, segment)

    with pytest.raises(JobMismatchError, match="Rank 2 of 3 joined a job of 2"):
        receive(store, 2, 3)
    with pytest.raises(JobMismatchError, match="Rank 2 of 3 joined a job of 2"):
        handed_out.result(60)


def test_a_host_that_nobody_visits_names_the_missing(
    threads: ThreadPoolExecutor, segment: int
) -> None:
    with pytest.raises(WorkerTimeoutError, match=r"0\.2 s for rank 1 of 2") as raised:
        hand_out(threads, HashStore(), segment, 0.2).result(60)

    assert raised.value.ranks == (1,)


def test_an_address_that_nobody_answers_is_given_up() -> None:
    store = HashStore()
    store.set("key", json.dumps({"address": "unisono-nobody", "token": ""}))

    with pytest.raises(WorkerLostError, match="could not connect") as raised:
        receive(store)

    assert raised.value.ranks == (0,)


def test_an_old_address_does_not_hide_the_new_one(
    threads: ThreadPoolExecutor, segment: int
) -> None:
    store = HashStore()
    store.set("key", json.dumps({"address": "unisono-nobody", "token": ""}))
    received = threads.submit(receive, store)
    handed_out = hand_out(threads, store, segment)

    new = received.result(60)
    assert os.path.sameopenfile(new.fd, segment)
    new.close()
    handed_out.result(60)
