"""Who is let in where processes of a job call each other, and how long a stranger can bother."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from keyboard import press_ctrl_c_in

from unisono.communicators.greeting import (
    Guest,
    Reception,
    RefusedError,
    Steps,
    StrangeError,
    call,
    job_key,
    welcome,
)

KEY = b"k" * 32
SECONDS = 30.0


class Door:
    """Welcomes callers in a thread, as the store of a job does."""

    def __init__(self) -> None:
        self.known: list[int] = []
        self.refused: list[int] = []
        listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = listener.getsockname()
        self._reception = Reception(listener, self._steps)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _steps(self, guest: Guest) -> Steps[None]:
        try:
            self.known.append((yield from welcome(guest, KEY, None)).rank)
        except RefusedError as error:
            self.refused.append(error.rank)

    def _run(self) -> None:
        while not self._is_over.is_set():
            self._reception.turn(0.05)

    def has(self, *, known: list[int]) -> bool:
        """Whether these have come: the door may notice it a moment after they do."""
        deadline = time.monotonic() + SECONDS
        while self.known != known and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.known == known

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._reception.close()


@pytest.fixture
def door() -> Iterator[Door]:
    one = Door()
    yield one
    one.close()


def come(door: Door, key: bytes = KEY, rank: int = 3, seconds: float = SECONDS) -> None:
    call(door.address, key, rank, None, time.monotonic() + seconds).socket.close()


def test_both_ends_get_the_same_new_key_every_time(door: Door) -> None:
    keys = []
    for rank in (1, 2):
        greeted = call(door.address, KEY, rank, None, time.monotonic() + SECONDS)
        keys.append(greeted.key)
        greeted.socket.close()
    assert door.has(known=[1, 2])
    assert len({*keys, KEY}) == 3


def test_another_key_is_refused_and_the_caller_is_told(door: Door) -> None:
    with pytest.raises(RefusedError, match="another job, or has another token"):
        come(door, b"x" * 32, rank=7)
    come(door)
    assert door.has(known=[3])
    assert door.refused == [7]


@pytest.mark.parametrize(
    "words", [b"", b"GET / HTTP/1.1\r\n\r\n" * 9, b"[" * 5000, b'{"token": "\xc3\xa9"}' * 9]
)
def test_strangers_are_hung_up_on_and_learn_nothing(door: Door, words: bytes) -> None:
    with socket.create_connection(door.address, timeout=SECONDS) as stranger:
        heard = b""
        with suppress(OSError):
            stranger.sendall(words)
            stranger.shutdown(socket.SHUT_WR)
            while more := stranger.recv(1000):
                heard += more
    # A protocol, a random number, and zeros if it has said enough to be refused.
    assert heard[26:].strip(b"\0") == b""
    come(door)
    assert door.has(known=[3])


def test_silent_and_slow_strangers_keep_nobody_waiting(door: Door) -> None:
    with ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(door.address, timeout=SECONDS))
            for _ in range(300)
        ]
        for one in strangers[-50:]:
            with suppress(OSError):
                one.send(b"?")
        come(door)
        assert door.has(known=[3])


def test_a_reception_without_descriptors_serves_again_when_there_are_some(door: Door) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_connection(door.address, timeout=SECONDS):
        used = max(map(int, os.listdir("/proc/self/fd")))
        caller = socket.socket()
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, before[1]))
        try:
            caller.connect(door.address)
            time.sleep(0.2)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            caller.close()
        come(door)
    assert door.has(known=[3])


@contextmanager
def somebody_who(does: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with suppress(OSError):
                while True:
                    guest, _ = listener.accept()
                    with guest:
                        does(guest)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(SECONDS)


def say_nothing(guest: socket.socket) -> None:
    guest.recv(1)


def trickle(guest: socket.socket) -> None:
    while True:
        guest.send(b"u")
        time.sleep(0.05)


@pytest.mark.parametrize("does", [say_nothing, trickle])
def test_a_call_ends_at_its_deadline(does: Callable[[socket.socket], None]) -> None:
    with somebody_who(does) as address, pytest.raises((TimeoutError, StrangeError)):
        call(address, KEY, 1, None, time.monotonic() + 0.4)


def test_a_call_hears_ctrl_c() -> None:
    with somebody_who(say_nothing) as address:
        press_ctrl_c_in(lambda: call(address, KEY, 1, None, time.monotonic() + SECONDS))


def test_something_else_is_told(door: Door) -> None:
    with (
        somebody_who(lambda guest: guest.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as address,
        pytest.raises(StrangeError, match="HTTP"),
    ):
        call(address, KEY, 1, None, time.monotonic() + SECONDS)


def test_keys_follow_from_the_token_and_from_what_they_are_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = set()
    for token in ("", "one", "another", "é"):
        monkeypatch.setenv("UNISONO_JOB_TOKEN", token)
        keys |= {job_key("a job"), job_key("another job")}
    assert len(keys) == 8
