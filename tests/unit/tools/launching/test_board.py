"""What a launcher of an elastic job finds out about the launchers of other hosts."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, suppress

import pytest
from processes.ports import free_port

from unisono.cluster import Address, ClusterSpec, Membership, SimpleClusterResolver
from unisono.cluster.elastic import doors, finding
from unisono.cluster.elastic.doors import Contact, call_door
from unisono.cluster.elastic.generation import Generation
from unisono.communicators.sockets import listening
from unisono.errors import ClusterError, CommunicationError
from unisono_tools.launching import board
from unisono_tools.launching.board import Board, running_workers


@pytest.fixture(autouse=True)
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for one in (doors, finding):
        monkeypatch.setattr(one, "_ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(finding, "_TELL_SECONDS", 0.01)
    monkeypatch.setattr(board, "_START_SECONDS", 0.2)


def test_there_is_no_job_where_nobody_listens_or_no_worker_was_started() -> None:
    endpoint = Address("127.0.0.1", free_port())
    assert running_workers([endpoint]) == ""
    started = Board([endpoint])
    assert started.address == f"127.0.0.1:{endpoint.port + 1}"
    assert running_workers([endpoint]) == ""


def test_a_launcher_that_is_slow_to_answer_is_not_taken_for_none() -> None:
    endpoint = Address("127.0.0.1", free_port())
    with (
        listening("127.0.0.1", endpoint.port + 1),
        pytest.raises(ClusterError, match="none of its workers answers"),
    ):
        running_workers([endpoint])


def test_a_stranger_at_the_port_of_a_launcher_is_no_job() -> None:
    endpoint = Address("127.0.0.1", free_port())
    callers: list[socket.socket] = []
    with listening("127.0.0.1", endpoint.port + 1) as stranger:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    callers.append(stranger.accept()[0])
                    callers[-1].sendall(b"HTTP/1.1 400 Bad Request\r\n" * 4)

        thread = threading.Thread(target=answer)
        thread.start()
        assert running_workers([endpoint]) == ""
        stranger.shutdown(socket.SHUT_RDWR)
        thread.join(60)
    for caller in callers:
        caller.close()


def test_what_workers_say_while_they_are_said_to_be_started_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint = Address("127.0.0.1", free_port())
    started = Board([endpoint])
    address = endpoint.host, endpoint.port + 1
    write = started._store.set

    def write_late(key: str, value: str) -> None:
        write(finding.DOORS, "127.0.0.1:1")
        write(key, value)

    monkeypatch.setattr(started._store, "set", write_late)
    started.begin()

    assert finding.doors_known_at(address) == "127.0.0.1:1"


def test_late_news_of_an_old_generation_do_not_hide_those_of_a_newer_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    endpoint = Address("127.0.0.1", free_port())
    started = Board([endpoint])
    monkeypatch.setenv(finding.LAUNCHER, started.address)
    generations = [
        Generation(number, {0: Contact("127.0.0.1", number, "process", "", 1, "")}, {0: ()}, 1, {})
        for number in (1, 2)
    ]
    may_call = [threading.Event(), threading.Event()]
    calls = iter(may_call)

    def call_late(host: str, port: int) -> object:
        assert next(calls).wait(60)
        return call_door(host, port)

    monkeypatch.setattr(finding, "call_door", call_late)
    tellers: list[threading.Thread] = []
    for one in generations:
        before = set(threading.enumerate())
        finding.publish(one, "process")
        tellers += set(threading.enumerate()) - before
    for event, teller in reversed(list(zip(may_call, tellers, strict=True))):
        event.set()
        teller.join(60)

    monkeypatch.setattr(finding, "call_door", call_door)
    assert finding.doors_known_at((endpoint.host, endpoint.port + 1)) == "127.0.0.1:2"


def test_a_worker_counts_as_ended_in_the_generation_that_the_launcher_knows_to_be_its_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finding, "_TELL_SECONDS", 60.0)
    # No process has this number.
    dead = Contact("127.0.0.1", 1, "dead", doors.machine_identity(), 2**30, "1")
    if not dead.machine or not dead.has_ended():
        pytest.skip("this system does not tell when a process has ended")
    alive = Contact("127.0.0.1", 2, "alive", "another machine", 1, "1")
    first, second = (
        Generation(number, {0: dead, 1: alive}, {0: (), 1: ()}, 2, {}) for number in (0, 1)
    )
    assert finding.ended_in(first) == []
    started = Board([])
    monkeypatch.setenv(finding.LAUNCHER, started.address)
    assert finding.ended_in(first) == []
    finding.publish(first, "dead")
    assert finding.ended_in(first) == ["dead"]
    finding.publish(second, "dead")
    assert finding.ended_in(first) == []
    assert finding.ended_in(second) == ["dead"]


def test_a_worker_in_the_place_of_another_does_not_begin_a_job_that_others_have_gone_on_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launchers that came later have started these others, which may even have finished."""
    monkeypatch.setattr(finding, "_TELL_SECONDS", 60.0)
    monkeypatch.setattr(finding, "_JOIN_SECONDS", 0.0)
    alone = Membership.of(SimpleClusterResolver(ClusterSpec({})))
    own, near, late = (
        Contact("127.0.0.1", free_port(), name, "", 1, "", launch)
        for name, launch in (("own", "first"), ("near", "first"), ("late", "second"))
    )
    started = Board([])
    monkeypatch.setenv(finding.LAUNCHER, started.address)
    started.begin()
    for number, workers in enumerate(([own, near], [own, near, late], [own])):
        contacts = dict(enumerate(workers))
        positions = dict.fromkeys(contacts, ())
        finding.publish(Generation(number, contacts, positions, 3, {}), "own")
        if late in workers:
            with pytest.raises(CommunicationError, match="does not begin the job again"):
                finding.running_job(alone)
        else:
            assert finding.running_job(alone) is None


def test_a_launcher_that_accepts_no_connections_any_more_is_not_taken_for_none() -> None:
    with socket.socket() as paused:
        paused.bind(("127.0.0.1", 0))
        paused.listen(0)
        address = paused.getsockname()
        with ExitStack() as callers:
            for _ in range(2):
                caller = callers.enter_context(socket.socket())
                caller.setblocking(False)
                caller.connect_ex(address)
            assert doors.may_answer(*address, is_here=True)
            # A host that is down does not answer, either.
            assert not doors.may_answer(*address)
    assert not doors.may_answer(*address, is_here=True)
