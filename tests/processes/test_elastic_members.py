"""Workers of an elastic job are killed, paused, cut off and started again; the others go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest

from processes.elastic_job import Task, Worker, start, undisturbed
from processes.forked import PROCESSES
from processes.namespaces import Hosts, board_on, enter, make_hosts
from processes.ports import free_ports
from unisono.cluster import Address
from unisono.cluster.elastic.finding import JOIN, LAUNCHER
from unisono.experimental import CommunicationImplementation
from unisono_tools.launching.board import Board

STEPS = 12
pytestmark = pytest.mark.timeout(200)


@contextmanager
def job(
    count: int,
    fates: dict[int, dict[int, str]],
    *,
    spare: int = 0,
    stops: dict[int, tuple[str, int]] | None = None,
    **more: Any,
) -> Iterator[tuple[list[Worker], list[Task]]]:
    """Starts workers, and ends them.

    Args:
        count: How many there are at first.
        fates: What happens to them, and to those that join.
        spare: How many may join later.
        stops: Where some of them stop; see `Task.stops_after`.
        more: What else is in their tasks; see `Task`.

    Yields:
        Those that were started, to which others may be added, and the tasks of all.
    """
    addresses = [f"127.0.0.1:{port}" for port in free_ports(count + spare)]
    tasks = [
        # The first ones know of no others.
        Task(
            addresses[:count] if n < count else addresses,
            n,
            STEPS,
            fates.get(n, {}),
            stops_after=(stops or {}).get(n),
            **more,
        )
        for n in range(count + spare)
    ]
    started = start(*tasks[:count])
    try:
        yield started, tasks
    finally:
        for one in started:
            one.end()


@pytest.mark.parametrize(
    "implementation", [CommunicationImplementation.AUTO, CommunicationImplementation.TCP]
)
def test_survivors_go_on_with_the_same_bits(implementation: CommunicationImplementation) -> None:
    fates = {0: {3: "kill"}, 1: {6: "kill after"}, 3: {9: "kill"}}
    with job(4, fates, settings={"implementation": implementation}) as (started, _):
        assert started[2].hear("done") == (undisturbed(STEPS), (2,))


def test_workers_join_and_leave_with_the_same_bits() -> None:
    fates = {0: {8: "kill"}, 1: {5: "leave"}}
    with job(1, fates, spare=2, wait_for={2: 3}) as (started, tasks):
        started[0].hear("began")
        started += start(*tasks[1:])
        assert started[1].hear("left") is None
        state, members = started[2].hear("done")
        assert state == undisturbed(STEPS)
        assert members in [(1,), (2,)]


def test_a_paused_worker_is_given_up_and_joins_again() -> None:
    fates = {0: {3: "stop"}}
    settings = {"timeout_seconds": 10.0}
    with job(3, fates, settings=settings, wait_for={6: 3}) as (started, _):
        assert started[1].hear("met")[0] == (0, 1, 2)
        assert started[1].hear("met")[0] == (1, 2)
        started[0].wake_up()
        kind, text = started[0].hear("raised")
        assert kind == "WorkerLostError"
        assert "without this one" in text
        for one in started:
            assert one.hear("done") == (undisturbed(STEPS), (1, 2, 3))


def test_a_paused_worker_does_not_go_on_after_those_who_went_on_without_it_have_ended() -> None:
    settings = {"timeout_seconds": 10.0}
    with job(4, {2: {3: "stop"}, 3: {3: "stop"}}, settings=settings) as (started, _):
        for one in started[:2]:
            assert one.hear("done") == (undisturbed(STEPS), (0, 1))
            one.process.join(60)
        for one in started[2:]:
            one.wake_up()
        for one in started[2:]:
            kind, text = one.hear("raised")
            assert kind == "WorkerLostError"
            assert "without this one" in text


def test_a_worker_that_is_paused_while_a_job_begins_does_not_begin_it_alone() -> None:
    """The others know it by then, and go on without it. It wakes up when they have ended."""
    stops = {1: ("unisono.workers.joining:gather_texts", 2)}
    with job(3, {}, stops=stops, settings={"timeout_seconds": 10.0}) as (started, _):
        for one in (started[0], started[2]):
            assert one.hear("done") == (undisturbed(STEPS), (0, 2))
            one.process.join(60)
        started[1].wake_up()
        kind, text = started[1].hear("raised")
        assert kind == "WorkerLostError"
        assert "without this one" in text


def test_a_paused_worker_goes_on_if_the_others_have_ended_without_going_on() -> None:
    with job(2, {0: {3: "kill"}, 1: {3: "stop"}}) as (started, _):
        started[0].process.join(60)
        started[1].wake_up()
        assert started[1].hear("done") == (undisturbed(STEPS), (1,))


def test_a_worker_that_runs_something_else_is_not_let_in() -> None:
    with job(1, {}, spare=1, wait_for={2: 2}) as (started, tasks):
        started[0].hear("began")
        started += start(replace(tasks[1], num_replicas=5))
        kind, text = started[1].hear("raised")
        assert kind == "JobMismatchError"
        assert "num_replicas" in text


@contextmanager
def job_on_hosts(
    places: list[int], fates: dict[int, dict[int, str]], *, begins: bool = True, **more: Any
) -> Iterator[tuple[list[Worker], list[Task], Hosts]]:
    """Starts workers on several hosts, unless the test does. None sees when one elsewhere ends."""
    with make_hosts(max(places) + 1) as hosts:
        addresses = [f"{hosts.address(place)}:{port}" for port, place in enumerate(places, 4000)]
        boards = [board_on(hosts, place, 3000) for place in range(max(places) + 1)]
        tasks = [
            Task(
                addresses,
                n,
                STEPS,
                fates.get(n, {}),
                namespace=hosts.names[place],
                environ={LAUNCHER: boards[place].address},
                **more,
            )
            for n, place in enumerate(places)
        ]
        started = start(*tasks) if begins else []
        try:
            yield started, tasks, hosts
        finally:
            for one in started:
                one.end()


def launcher_on(pipe: Connection, namespace: str | None, endpoint: str) -> None:
    """Keeps what the launcher of a host would keep for its workers."""
    if namespace is not None:
        enter(namespace)
    board = Board([Address.parse(endpoint)])
    pipe.send(board.address)
    pipe.recv()


def test_a_worker_does_not_go_on_alone_while_its_launcher_is_paused() -> None:
    """If it ended before its launcher went on, the next one would say that it had not gone on."""
    more: dict[str, Any] = {"settings": {"timeout_seconds": 10.0}, "wait_for": {2: 9}}
    with job_on_hosts([0, 1], {}, begins=False, **more) as (started, tasks, hosts):
        pipe, theirs = PROCESSES.Pipe()
        given = (theirs, hosts.names[0], f"{hosts.address(0)}:5000")
        launcher = PROCESSES.Process(target=launcher_on, args=given, daemon=True)
        launcher.start()
        assert launcher.pid is not None
        try:
            first = replace(tasks[0], environ={LAUNCHER: pipe.recv()})
            started += start(first, tasks[1])
            for one in started:
                one.hear("began")
            os.kill(launcher.pid, signal.SIGSTOP)
            hosts.cut(1)
            kind, text = started[0].hear("raised")
            assert kind == "WorkerTimeoutError"
            assert "launcher" in text
        finally:
            launcher.kill()
            launcher.join()


def test_a_worker_trains_with_those_of_other_launchers_only_if_its_own_knows_of_them() -> None:
    """If it were lost, the one in its place would begin the job again while these go on."""
    address, joins = (f"127.0.0.1:{port}" for port in free_ports(2))
    more: dict[str, Any] = {"settings": {"timeout_seconds": 10.0}, "wait_for": {2: 2}}
    pipe, theirs = PROCESSES.Pipe()
    given = (theirs, None, f"127.0.0.1:{free_ports(1)[0]}")
    launcher = PROCESSES.Process(target=launcher_on, args=given, daemon=True)
    launcher.start()
    assert launcher.pid is not None
    known = {LAUNCHER: pipe.recv()}
    started = start(Task([address], 0, STEPS, environ=known, **more))
    try:
        started[0].hear("began")
        os.kill(launcher.pid, signal.SIGSTOP)
        started += start(Task([joins], 0, STEPS, environ={JOIN: address}, **more))
        kind, text = started[0].hear("raised")
        assert kind == "WorkerTimeoutError"
        assert "launcher" in text
    finally:
        for one in started:
            one.end()
        launcher.kill()
        launcher.join()


def test_only_one_side_of_a_cut_goes_on() -> None:
    """The host of rank 0 has one worker of three, so the other host goes on."""
    more: dict[str, Any] = {"wait_for": {2: 9}, "settings": {"timeout_seconds": 10.0}}
    with job_on_hosts([0, 1, 1], {}, **more) as (started, _, hosts):
        alone, *others = started
        for one in started:
            one.hear("began")
        hosts.cut(0)
        for one in others:
            assert one.hear("met")[1] == (0,)
        kind, text = alone.hear("raised")
        assert kind == "CommunicationError"
        assert "cut in two" in text


def test_a_worker_that_is_started_again_says_that_the_one_before_it_has_ended() -> None:
    """Worker 1 alone hears nothing of rank 0 on the other host, and may not go on for that."""
    with job_on_hosts([0, 1], {0: {3: "kill"}}, wait_for={6: 2}) as (started, tasks, _):
        started[0].process.join(60)
        started += start(replace(tasks[0], fate={}))
        for one in started[1:]:
            assert one.hear("done") == (undisturbed(STEPS), (1, 2))
