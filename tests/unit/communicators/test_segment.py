"""Memory that is shared with those who are invited, and nobody else."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from unisono.communicators.segment import Host, Segment, create_segment, receive_segment
from unisono.errors import JobMismatchError, WorkerLostError, WorkerTimeoutError


@pytest.fixture
def segment() -> Iterator[Segment]:
    fd = create_segment(4096)
    yield Segment(fd, 1234)
    os.close(fd)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


def hand_out(
    threads: ThreadPoolExecutor, store: HashStore, segment: Segment, timeout_seconds: float = 10
) -> Future[None]:
    host = Host(store, "key", 2)
    return threads.submit(host.hand_out, segment, timeout_seconds, lambda: None)


def test_a_segment_is_private_and_keeps_its_size(segment: Segment) -> None:
    assert os.fstat(segment.fd).st_mode & 0o777 == 0o600
    assert os.fstat(segment.fd).st_size == 4096
    for num_bytes in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, num_bytes)


def test_a_guest_receives_the_same_memory(threads: ThreadPoolExecutor, segment: Segment) -> None:
    store = HashStore()
    handed_out = hand_out(threads, store, segment)

    fd, arena_bytes = receive_segment(store, "key", 1, 2, 10)
    handed_out.result(10)

    assert os.fstat(fd).st_ino == os.fstat(segment.fd).st_ino
    assert arena_bytes == 1234
    assert not store.check(["key"])
    os.close(fd)


@pytest.mark.parametrize("message", [b"", b"[]", b"{", b'{"token": "wrong", "rank": 1, "size": 2}'])
def test_a_stranger_receives_nothing(
    threads: ThreadPoolExecutor, segment: Segment, message: bytes
) -> None:
    store = HashStore()
    handed_out = hand_out(threads, store, segment)
    address = json.loads(store.get("key"))["address"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(f"\0{address}")
        stranger.send(message)

        assert stranger.recv(4096) == b""

    os.close(receive_segment(store, "key", 1, 2, 10).fd)
    handed_out.result(10)


def test_a_guest_of_another_job_is_told(threads: ThreadPoolExecutor, segment: Segment) -> None:
    store = HashStore()
    handed_out = hand_out(threads, store, segment)

    with pytest.raises(JobMismatchError, match="Rank 2 of 3 came to a job of 2"):
        receive_segment(store, "key", 2, 3, 10)
    with pytest.raises(JobMismatchError, match="Rank 2 of 3 came to a job of 2"):
        handed_out.result(10)


def test_a_host_that_nobody_visits_names_the_missing(
    threads: ThreadPoolExecutor, segment: Segment
) -> None:
    with pytest.raises(WorkerTimeoutError, match=r"0\.2 s for rank 1 of 2") as raised:
        hand_out(threads, HashStore(), segment, 0.2).result(10)

    assert raised.value.ranks == (1,)


def test_an_address_that_nobody_answers_is_given_up() -> None:
    store = HashStore()
    store.set("key", json.dumps({"address": "unisono-nobody", "token": ""}))

    with pytest.raises(WorkerLostError, match="found nobody") as raised:
        receive_segment(store, "key", 1, 2, 10)

    assert raised.value.ranks == (0,)


def test_an_old_address_does_not_hide_the_new_one(
    threads: ThreadPoolExecutor, segment: Segment
) -> None:
    store = HashStore()
    store.set("key", json.dumps({"address": "unisono-nobody", "token": ""}))
    received = threads.submit(receive_segment, store, "key", 1, 2, 10)
    handed_out = hand_out(threads, store, segment)

    new = received.result(10)
    assert os.path.sameopenfile(new.fd, segment.fd)
    os.close(new.fd)
    handed_out.result(10)
