"""The threads that serve lines."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

import pytest

from unisono.communicators.lines import Lines

SECONDS = 60.0


class End:
    """Lines with one connection, and the other end of it."""

    def __init__(self) -> None:
        own, self.socket = socket.socketpair()
        self.socket.settimeout(SECONDS)
        self.heard: SimpleQueue[Any] = SimpleQueue()
        self.lines = Lines(
            {7: own}, lambda _, message: self.heard.put(message), lambda *_: self.heard.put(None)
        )
        self.lines.start()

    def say(self, message: bytes) -> None:
        self.socket.sendall(message + b"\n")

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


@pytest.fixture
def ends() -> Iterator[list[End]]:
    with ExitStack() as stack:
        made = [End() for _ in range(3)]
        for end in made:
            stack.callback(end.close)
        yield made
    assert not threads()


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "unisono watch"]


def test_each_thread_serves_its_lines_until_their_end(ends: list[End]) -> None:
    assert len(threads()) == len(ends)
    for number, end in enumerate(ends):
        end.say(json.dumps([number]).encode())
        assert end.heard.get(timeout=SECONDS) == [number]
        end.lines.send(7, "answer", number)
        assert json.loads(end.socket.recv(100)) == ["answer", number]
    ends[0].close()
    ends[1].say(b"[9]")

    assert ends[1].heard.get(timeout=SECONDS) == [9]
    assert len(threads()) == len(ends) - 1


def test_what_one_cannot_read_ends_that_one_alone(ends: list[End]) -> None:
    ends[0].say(b"no JSON")
    assert ends[0].socket.recv(1) == b""
    ends[1].say(b"[1]")

    assert ends[1].heard.get(timeout=SECONDS) == [1]


def test_what_was_given_before_the_end_leaves(ends: list[End]) -> None:
    for number in range(100):
        ends[0].lines.send(7, number)
    ends[0].lines.close()

    with ends[0].socket.makefile() as lines:
        assert [json.loads(line) for line in lines] == [[number] for number in range(100)]


def test_a_forked_process_has_a_thread_of_its_own(ends: list[End]) -> None:
    if (child := os.fork()) == 0:
        try:
            # Those of the other process are not its to serve.
            ends[0].lines.send(7, "from the child")
            ends[0].lines.close()
            own = End()
            own.say(b"[1]")
            is_heard = own.heard.get(timeout=SECONDS) == [1]
            own.close()
            os._exit(0 if is_heard and not threads() else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    ends[0].say(b"[2]")

    assert ends[0].heard.get(timeout=SECONDS) == [2]
