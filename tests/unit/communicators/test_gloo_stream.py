"""Lines through the connections of a Gloo group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from unisono.communicators.gloo import break_connections, make_gloo_group
from unisono.communicators.gloo_stream import GlooStream
from unisono.communicators.lines import Lines

SECONDS = 60.0


class End:
    """Lines to the other rank of a group of two, and what has come."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.peer = 1 - group.rank()
        self.heard: SimpleQueue[Any] = SimpleQueue()
        self.ended: SimpleQueue[Any] = SimpleQueue()
        self.lines = Lines(
            {self.peer: GlooStream(group, self.peer)},
            lambda _, message: self.heard.put(message),
            lambda _, error: self.ended.put(error),
        )
        self.lines.start()

    def say(self, *message: Any) -> None:
        self.lines.send(self.peer, *message)


@pytest.fixture
def ends() -> Iterator[list[End]]:
    store = HashStore()

    def make(rank: int) -> End:
        return End(make_gloo_group(store, rank, 2, timeout_seconds=SECONDS))

    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(make, range(2)))
    yield made
    for end in made:
        end.lines.close()


def test_messages_of_any_length_come_in_order_and_take_no_descriptors(ends: list[End]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    given: list[list[Any]] = [["short"], ["long " * 10_000], *([number] for number in range(50))]
    for message in given:
        ends[0].say(*message)
        ends[1].say(*message)

    for end in ends:
        assert [end.heard.get(timeout=SECONDS) for _ in given] == given
    assert len(os.listdir("/proc/self/fd")) <= before


def test_what_came_before_the_connection_broke_is_heard_before_its_end(ends: list[End]) -> None:
    ends[0].say("the reason")
    assert ends[1].heard.get(timeout=SECONDS) == ["the reason"]
    ends[1].say("the end")
    ends[1].lines.close()
    break_connections(ends[1].group)
    # Who has said something looks whether it can still be answered.
    ends[0].say("are you there?")

    assert isinstance(ends[0].ended.get(timeout=SECONDS), ConnectionResetError)
    assert ends[0].heard.get(timeout=SECONDS) == ["the end"]


def test_what_comes_after_the_end_keeps_nothing_else_from_coming(ends: list[End]) -> None:
    ends[1].lines.close()
    for number in range(3):
        ends[0].say("too late", number)
    ends[0].lines.close()
    output = torch.zeros(9)
    received = ends[1].group.recv([output], 0, 5)
    ends[0].group.send([torch.ones(9)], 1, 5).wait()
    received.wait()

    assert output.sum() == 9
