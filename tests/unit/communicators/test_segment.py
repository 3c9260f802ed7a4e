"""Memory that is shared with those who are invited, and nobody else."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from torch._C._distributed_c10d import HashStore, Store

from unisono.communicators.segment import share_memory
from unisono.errors import CommunicationError, WorkerLostError, WorkerTimeoutError
from unisono.system import create_segment

KEY = "memory of 2 ranks"


class Entered:
    """A rank with the memory."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.failures: list[str] = []

    def check_health(self) -> None:
        pass

    def fail(self, kind: str, text: str, ranks: Sequence[int]) -> None:
        self.failures.append(f"{kind} {text}")

    def close(self) -> None:
        os.close(self.fd)


def cannot_enter(fd: int) -> Entered:
    os.close(fd)
    raise OSError(12, "Cannot allocate memory")


def share(
    store: Store,
    rank: int = 1,
    size: int = 2,
    seconds: float = 60,
    enter: Callable[[int], Entered] = Entered,
) -> Entered:
    create = functools.partial(create_segment, 4096)
    entered: Entered = share_memory(store, rank, size, seconds, create, enter)
    return entered


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def test_a_segment_is_private_and_only_grows() -> None:
    segment = create_segment(4096)
    assert os.fstat(segment).st_mode & 0o777 == 0o600
    os.ftruncate(segment, 8192)
    with pytest.raises(PermissionError):
        os.ftruncate(segment, 0)
    os.close(segment)


def check_shared(ranks: Sequence[Future[Entered]]) -> None:
    """All ranks come by the same memory, which no child process of theirs inherits."""
    entered = [rank.result(60) for rank in ranks]
    for one in entered:
        assert os.path.sameopenfile(one.fd, entered[0].fd)
        assert not os.get_inheritable(one.fd)
    for one in entered:
        one.close()


def test_all_ranks_come_by_the_same_memory(threads: ThreadPoolExecutor) -> None:
    store = HashStore()
    check_shared([threads.submit(share, store, rank, 4) for rank in range(4)])


def invite(threads: ThreadPoolExecutor, store: Store) -> tuple[Future[Entered], list[str]]:
    """Begins rank 0, and returns the address and the secret that it leaves, too."""
    host = threads.submit(share, store, 0)
    store.wait([KEY])
    return host, store.get(KEY).decode().split()


@pytest.mark.parametrize("message", [b"", b"wrong", b"x" * 32, b"x" * 4096, b"\xff" * 32])
def test_a_stranger_receives_nothing(threads: ThreadPoolExecutor, message: bytes) -> None:
    store = HashStore()
    host, (address, _) = invite(threads, store)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(f"\0{address}")
        stranger.send(message)
        # One that has said too little is still listened to.
        guest = threads.submit(share, store)
        received, descriptors, _, _ = socket.recv_fds(stranger, 4096, 1)

    assert (received, descriptors) == (b"", [])
    check_shared([host, guest])


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
    threads: ThreadPoolExecutor, knows_the_secret: bool
) -> None:
    store = HashStore()
    host, (address, secret) = invite(threads, store)
    command = [sys.executable, "-I", "-S", "-c", NOBODY, address]

    told = subprocess.run(
        [*command, secret if knows_the_secret else ""], capture_output=True, timeout=60, check=True
    )

    assert told.stdout.strip() == b"b''"
    check_shared([host, threads.submit(share, store)])


def test_silent_guests_keep_nobody_waiting(threads: ThreadPoolExecutor) -> None:
    store = HashStore()
    host, (address, _) = invite(threads, store)
    with ExitStack() as stack:
        for _ in range(50):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            silent.connect(f"\0{address}")
        check_shared([host, threads.submit(share, store)])


@pytest.mark.parametrize("short", [0, 2])
def test_a_rank_without_memory_is_told_to_all(threads: ThreadPoolExecutor, short: int) -> None:
    store = HashStore()
    ranks = [
        threads.submit(share, store, rank, 3, 60, cannot_enter if rank == short else Entered)
        for rank in range(3)
    ]
    for rank in ranks:
        with pytest.raises(
            CommunicationError, match=rf"Rank {short} cannot share memory.*ulimit"
        ) as raised:
            rank.result(60)
        assert raised.value.ranks == (short,)


def test_ranks_that_are_late_are_named_and_those_who_came_hear_of_it() -> None:
    made: list[Entered] = []

    def enter(fd: int) -> Entered:
        made.append(Entered(fd))
        return made[-1]

    with pytest.raises(WorkerTimeoutError, match=r"0\.2 s for rank 1 of 2") as raised:
        share(HashStore(), 0, seconds=0.2, enter=enter)

    assert raised.value.ranks == (1,)
    assert made[0].failures == [f"timeout {raised.value}"]


def test_an_address_that_nobody_answers_is_given_up() -> None:
    store = HashStore()
    store.set(KEY, "unisono-nobody secret")

    with pytest.raises(WorkerLostError, match="could not connect") as raised:
        share(store)

    assert raised.value.ranks == (0,)
