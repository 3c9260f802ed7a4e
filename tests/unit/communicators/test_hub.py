"""What the hub makes of what ranks tell it, and of connections that end."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from unisono.communicators import hub
from unisono.communicators.hub import Hub
from unisono.communicators.sockets import keep_alive

SECONDS = 60.0


class Rank:
    """The other end of a line of the hub. That of rank 0, which has no line, is made up."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.socket, self.of_hub = socket.socketpair()
        self.socket.settimeout(SECONDS)
        self._incoming = self.socket.makefile()
        self.sequence = 0
        self.hub: Hub | None = None

    def say(self, kind: str, *details: Any, sequence: int | None = None) -> None:
        self.sequence = self.sequence if sequence is None else sequence
        collective = f"number {self.sequence}" if self.sequence else None
        message = [kind, self.sequence, collective, *details]
        if self.hub is not None:
            self.hub.hear(*message)
        else:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def be_told(self, _: int, message: list[Any]) -> None:
        self.of_hub.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> Any:
        return json.loads(self._incoming.readline() or "null")

    def hear_failure(self) -> tuple[str, str, list[int]]:
        """Answers what is asked until an error comes."""
        while (message := self.hear())[0] == "tell":
            self.say("does")
        kind, name, text, ranks = message
        assert kind == "failure"
        self.say("knows")
        return name, text, ranks

    def end(self) -> None:
        self._incoming.close()
        self.socket.close()
        if self.hub is not None:
            self.of_hub.close()


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    made = [Rank(number) for number in range(4)]
    hub = Hub({rank.number: rank.of_hub for rank in made[1:]}, made[0].be_told)
    hub.start()
    made[0].hub = hub
    for rank in made:
        rank.say("here", f"host {rank.number // 2}")
    yield made
    hub.close(0)
    for rank in made:
        rank.end()


def heard_by(ranks: list[Rank]) -> tuple[str, str, list[int]]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        heard = list(pool.map(Rank.hear_failure, ranks))
    assert heard == [heard[0]] * len(heard)
    return heard[0]


def test_who_has_not_begun_a_collective_is_late(ranks: list[Rank]) -> None:
    for rank in ranks[:3]:
        rank.say("waits", sequence=5)
    ranks[1].say("late", 60, [])

    name, text, late = heard_by(ranks)
    assert (name, late) == ("WorkerTimeoutError", [3])
    assert "Rank 1 waited 60 s in number 5 for rank 3." in text
    assert "rank 0: in number 5; rank 1" in text


def test_who_does_not_answer_is_late_not_lost(ranks: list[Rank]) -> None:
    for rank in (ranks[0], ranks[1], ranks[3]):
        rank.say("waits", sequence=2)
    ranks[0].say("late", 60, [3])

    name, text, late = heard_by([ranks[0], ranks[1], ranks[3]])
    assert (name, late) == ("WorkerTimeoutError", [2])
    assert "rank 2: between collectives, after number 0 (does not answer now)" in text


def test_who_waits_in_an_earlier_collective_is_not_at_fault(ranks: list[Rank]) -> None:
    for rank, sequence in zip(ranks[:3], [7, 7, 6], strict=True):
        rank.say("waits", sequence=sequence)
    ranks[0].say("late", 60, [])

    assert heard_by(ranks[:3])[2] == [3]


def test_where_all_have_begun_the_ranks_that_one_waits_for_are_late(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.say("waits", sequence=2)
    ranks[1].say("late", 60, [2])

    assert heard_by(ranks)[2] == [2]


def test_the_first_cause_wins(ranks: list[Rank]) -> None:
    ranks[2].say("failed", "UnequalCollectivesError", "rank 3 called another", [3])
    assert ranks[2].hear_failure()[2] == [3]
    ranks[0].say("broke", 2, "reset")
    ranks[1].say("late", 60, [])

    assert heard_by([ranks[0], ranks[1], ranks[3]]) == (
        "UnequalCollectivesError",
        "rank 3 called another",
        [3],
    )


def test_rank_0_is_told_when_the_others_know(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_ANSWER_SECONDS", SECONDS)
    ranks[2].say("failed", "UnequalCollectivesError", "rank 3 called another", [3])
    for rank in ranks[1:3]:
        rank.hear_failure()
    assert ranks[3].hear()[0] == "failure"
    assert not select.select([ranks[0].socket], [], [], 0.1)[0]
    ranks[3].end()

    assert ranks[0].hear_failure()[2] == [3]


def test_a_broken_connection_to_a_process_that_has_ended_is_told_so(ranks: list[Rank]) -> None:
    ranks[0].say("broke", 2, "reset")
    ranks[2].end()

    name, text, lost = heard_by([ranks[0], ranks[1], ranks[3]])
    assert (name, lost) == ("WorkerLostError", [2])
    assert "rank 2 has ended" in text


def test_who_has_ended_is_found_where_nobody_knows_whose_connection_broke(
    ranks: list[Rank],
) -> None:
    ranks[0].say("broke", None, "reset")
    ranks[3].end()

    assert heard_by(ranks[:3])[2] == [3]


def test_a_connection_that_broke_between_ranks_that_live_names_the_other_end(
    ranks: list[Rank],
) -> None:
    ranks[0].say("broke", 2, "reset")

    name, text, lost = heard_by(ranks)
    assert (name, lost) == ("WorkerLostError", [2])
    assert "rank 2 lives, but a connection to it broke (reset)" in text


@pytest.mark.parametrize("waits_first", [False, True])
def test_who_closed_before_a_collective_is_lost_to_those_in_it(
    ranks: list[Rank], waits_first: bool
) -> None:
    if waits_first:
        ranks[0].say("waits", sequence=4)
    ranks[3].say("goodbye", sequence=3)
    ranks[3].end()
    if not waits_first:
        ranks[0].say("waits", sequence=4)

    name, text, lost = heard_by(ranks[:3])
    assert (name, lost) == ("WorkerLostError", [3])
    assert "rank 3 has closed its communicator" in text


def test_who_left_after_the_same_collective_is_not_lost(ranks: list[Rank]) -> None:
    ranks[2].say("goodbye", sequence=4)
    ranks[2].end()
    # Without a goodbye, as a process does that ends in a hurry.
    ranks[3].end()
    ranks[0].say("waits", sequence=4)

    assert not select.select([ranks[0].socket], [], [], 0.3)[0]


def test_health_is_good_until_somebody_has_gone(ranks: list[Rank]) -> None:
    ranks[1].say("asks")
    assert ranks[1].hear() == ["well"]
    ranks[2].end()
    message = ["well"]
    while message == ["well"]:
        ranks[1].say("asks")
        message = ranks[1].hear()
    assert message == ["tell"]
    ranks[1].say("does")
    assert heard_by([ranks[0], ranks[1], ranks[3]])[2] == [2]


def test_who_hears_that_rank_0_closes_knows_after_which_collective() -> None:
    rank = Rank(1)
    hub = Hub({1: rank.of_hub}, lambda *_: None)
    hub.start()
    hub.close(17)

    assert rank.hear() == ["goodbye", 17]
    assert rank.hear() is None
    rank.end()


@pytest.fixture
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        calling = socket.create_connection(listener.getsockname())
        called, _ = listener.accept()
    with calling, called:
        yield calling, called


@pytest.mark.parametrize("timeout_seconds", [0.5, 2, 8, 61, 300, 1e9])
def test_keepalive_runs_out_with_the_time_that_was_given(
    connected: tuple[socket.socket, socket.socket], timeout_seconds: float
) -> None:
    keep_alive(connected[0], timeout_seconds)
    options = [
        connected[0].getsockopt(socket.IPPROTO_TCP, option)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    ]

    idle, interval, count = options
    wanted = min(max(2, timeout_seconds), 24 * 3600)
    assert wanted <= idle + interval * count <= wanted * 1.2 + 1
    assert idle <= 60


def test_a_connection_ends_with_its_process_though_a_child_lives_on(
    connected: tuple[socket.socket, socket.socket],
) -> None:
    calling, called = connected
    keep_alive(calling, 30)
    if (child := os.fork()) == 0:
        time.sleep(SECONDS)
        os._exit(0)
    try:
        calling.close()
        called.settimeout(SECONDS / 2)
        assert called.recv(1) == b""
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
