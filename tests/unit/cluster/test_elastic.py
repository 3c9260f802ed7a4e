"""Who may go on when workers of an elastic job are lost."""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import DistNetworkError, DistStoreError

from unisono.cluster import ClusterSpec, Membership, SimpleClusterResolver, WorkerCard
from unisono.cluster.elastic import ElasticMembers, finding, gathering
from unisono.cluster.elastic.doors import Contact, machine_identity
from unisono.cluster.elastic.gathering import Agreed, Attendee, Gathering
from unisono.cluster.elastic.generation import Choice, Generation, Rules, Standing, Vote, misfit
from unisono.cluster.elastic.notices import leave_notice
from unisono.communicators import IdentityCommunicator, JobStore
from unisono.communicators.job_store import local_store
from unisono.costs import Link, Tuning
from unisono.devices import cpu_slots
from unisono.errors import CommunicationError, WorkerLostError
from unisono.options import CommunicationOptions
from unisono.system import process_start
from unisono.workers.joining import join_elastic

ALONE = Membership.of(SimpleClusterResolver(ClusterSpec({})))
CARD = WorkerCard(0, "host", 1, 4, 1, 4, "train.py", "1", "3", "2")


def generation(number: int, members: Iterable[int]) -> Generation:
    contacts = {one: Contact("127.0.0.1", 1, f"process {one}", "", 1, "") for one in members}
    return Generation(number, contacts, dict.fromkeys(contacts, (number,)), 9, {"process 0": 1})


def subsets(members: Iterable[int]) -> list[set[int]]:
    row = list(members)
    return [set(one) for n in range(len(row) + 1) for one in itertools.combinations(row, n)]


def may_go_on(last: Generation, present: Iterable[int], dead: Iterable[int]) -> bool:
    return last.may_go_on(*([f"process {n}" for n in numbers] for numbers in (present, dead)))


@pytest.mark.parametrize("size", range(1, 6))
def test_never_two_parts_go_on(size: int) -> None:
    """Also if workers of the part that has gone on die later, and the others know of that."""
    last, everybody = generation(3, range(size)), set(range(size))
    for dead in subsets(everybody):
        for part in subsets(everybody):
            if not any(may_go_on(last, part, known) for known in subsets(dead - part)):
                continue
            for others in subsets(everybody - part - dead):
                if part - dead:
                    assert not any(may_go_on(last, others, known) for known in subsets(dead))


@pytest.mark.parametrize("size", range(1, 6))
def test_one_part_goes_on_where_nobody_is_dead_or_all_others_are(size: int) -> None:
    last, everybody = generation(3, range(size)), set(range(size))
    for part in subsets(everybody):
        others = everybody - part
        assert may_go_on(last, part, ()) != may_go_on(last, others, ())
        assert may_go_on(last, part, others) == bool(part)


def test_nobody_goes_on_who_was_not_there() -> None:
    assert not may_go_on(generation(1, [0, 1]), [5], dead=[0, 1])
    assert not may_go_on(generation(1, [0, 1]), [5], dead=())


def test_those_who_leave_do_not_go_on_by_themselves_while_others_are_silent() -> None:
    """The others may have gone on without them. Those that are left to vote count all."""
    last = generation(3, range(3))
    assert not may_go_on(last, [0, 1], dead=[0, 1])
    assert may_go_on(last, [0, 1], dead=[0])
    assert may_go_on(last, [0, 1], dead=[0, 1, 2])


def chosen(present: Iterable[int], *, min_workers: int = 1, has_state: bool = True) -> Choice:
    """What a meeting decides where workers 0 to 3 were the last, and some of them have come."""
    last = generation(3, range(4))._replace(job="job")
    votes = [
        Vote(last.contacts[n], n + 1, Standing(last), (7,) if has_state else None, [], CARD)
        for n in present
    ]
    newcomer = Vote(generation(0, [8]).contacts[8], 1, None, None, [], CARD)
    rules = Rules(min_workers, 4, 30.0)
    return Choice(rules, [*votes, newcomer], dead=["process 3"], admits=True)


def test_those_who_have_come_are_the_next_generation() -> None:
    choice = chosen([0, 2])
    assert choice.missing() == {1}
    assert choice.lacks() is None
    found = choice.generation()
    assert list(found.contacts) == [0, 2, 9]
    assert found.positions == {0: (7,), 2: (7,), 9: None}
    assert (found.number, found.next_number, found.job) == (4, 10, "job")
    assert found.votes == {"process 0": 1, "process 2": 3, "process 8": 1}


def test_too_few_workers_are_told_why_they_cannot_go_on() -> None:
    assert "cut in two" in str(chosen([2]).lacks())
    assert "min_workers" in str(chosen([0, 1], min_workers=4).lacks())
    assert chosen([0, 1], min_workers=3).lacks() is None
    assert "state of an elastic job" in str(chosen([0, 1, 2], has_state=False).lacks())


def test_a_worker_of_another_script_is_refused() -> None:
    assert misfit(CARD, replace(CARD, rank=2, size=9, num_devices=2)) is None
    assert "script" in str(misfit(CARD, replace(CARD, script="other.py")))


def test_workers_know_together_what_each_knows() -> None:
    first, second, third = generation(1, [0, 1, 2]), generation(2, [0, 1]), generation(3, [0])
    accepted = Standing(first, (second,))

    # One that nobody knows to count may still count.
    assert accepted.together_with([Standing(first)]) == accepted
    # One that counts came after it.
    assert accepted.together_with([Standing(second)]) == Standing(second)
    assert accepted.together_with([Standing(first, (third,))]).accepted == (second, third)
    assert accepted.together_with([accepted]) == accepted


def test_a_standing_arrives_as_it_was() -> None:
    standing = Standing(generation(1, [0, 2]), (generation(4, [2]),))
    vote = Vote(standing.last.contacts[0], 2, standing, (7,), ["dead"], CARD)
    assert Vote.from_text(vote.to_text().encode()) == vote
    one = generation(3, range(4))._replace(job="job")
    assert Generation.from_text(one.to_text()) == one


def test_a_process_that_has_ended_is_known_to_be_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process:
        started = process_start(process.pid)
        if started is None:
            pytest.skip("this system does not tell when a process has started")
        contact = Contact("", 0, "", machine_identity(), process.pid, started)
        assert not contact.has_ended()
        process.kill()
        # Also before its parent has asked how.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert contact.has_ended()
        assert not contact._replace(machine="another").has_ended()
    assert contact.has_ended()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        # Nothing is known now of one that lives.
        with pytest.raises(OSError, match="Too many open files"):
            process_start(os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    # Its number may belong to another process by now.
    mine = contact._replace(process_id=os.getpid())
    assert mine.has_ended() == (process_start(os.getpid()) != started)


@pytest.mark.parametrize(
    "container",
    [
        # The kernel does not tell by what name it was started: gVisor has none.
        ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc/sys/kernel/random && "$@"'],
        # The processes have other numbers than /proc shows.
        ["unshare", "--pid", "--fork", "sh", "-c", '"$@"; exit $?'],
    ],
)
def test_no_end_of_a_process_is_seen_where_proc_does_not_tell(container: list[str]) -> None:
    told = "from unisono.cluster.elastic.doors import machine_identity; print(machine_identity())"
    command = [*container, "sh", sys.executable, "-c", told]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if found.returncode:
        pytest.skip(found.stderr)
    assert found.stdout == "\n"
    assert machine_identity() or process_start(os.getpid()) is None


def test_a_worker_does_not_wait_for_a_meeting_that_is_silent() -> None:
    asked = []

    def ask(question: list[Any], answer_by: float) -> Any:
        asked.append((question[0], answer_by - time.monotonic()))
        if question[0] == "get":
            raise DistStoreError("no answer")
        return 1

    last = generation(3, [0, 1])
    door = JobStore("127.0.0.1", 1, ask, lambda: None)
    newcomer = Attendee(last.contacts[1], CARD, door, Rules(1, 4, 300.0))
    assert Gathering(newcomer, None, known=last).attend(door, "token") is None
    assert [kind for kind, _ in asked] == ["add", "set", "get"]
    assert all(seconds < 60 for _, seconds in asked)


def test_a_worker_that_others_have_gone_on_without_does_not_vote() -> None:
    """It may know that they have ended since, and those elsewhere may not know what they did."""
    if process_start(os.getpid()) is None:
        pytest.skip("this system does not tell when a process has started")
    door, last = local_store(), generation(3, [0, 1])
    contact = Contact.of(door)
    last = last._replace(contacts={**last.contacts, 1: contact})
    me = Attendee(contact, CARD, door, Rules(1, 4, 30.0), Standing(last))
    # It was let in again since.
    leave_notice(contact, 3)
    assert Gathering(me, (7,)).attend(door, "token") is None
    assert door.add("token/votes", 0) == 1
    leave_notice(contact, 4)
    with pytest.raises(WorkerLostError, match="without this one"):
        Gathering(me, (7,)).attend(door, "token")
    assert door.look(["token/vote/2"]) == [None]
    me.notices.close()


def test_a_worker_of_another_job_at_the_port_of_a_lost_one_is_not_heard() -> None:
    """Neither job has a token. The other one has come farther, and holds a meeting."""
    other = finding.open_door(ALONE, "127.0.0.1")
    last = generation(3, [0, 1])._replace(job="this")
    lost = last.contacts[0]._replace(port=other.port)
    last = last._replace(contacts={**last.contacts, 0: lost})
    other.set("generation", generation(7, [5])._replace(job="another").to_text())
    other.set("open", "token")
    me = Attendee(last.contacts[1], CARD, local_store(), Rules(1, 4, 1.0), Standing(last))
    with pytest.raises(CommunicationError, match="cut in two"):
        Gathering(me, (7,)).hold()
    assert other.add("token/votes", 0) == 0
    me.doors.close()
    other.close()


def test_one_that_leaves_is_told_that_others_go_on_as_it_may_be_paused_before_it_does() -> None:
    choice = chosen([0, 2])
    assert [one.process for one in choice.left_behind()] == ["process 1", "process 3"]


def test_a_meeting_waits_for_one_that_has_knocked_and_not_said_yet_who_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathering, "_KNOCK_SECONDS", 60.0)
    last = generation(3, [0])
    newcomer = generation(0, [8]).contacts[8]
    door, rules = local_store(), Rules(1, 4, 30.0)
    door.add("knocks", 1)

    def come() -> Agreed | None:
        deadline = time.monotonic() + 60
        while (token := door.look(["open"])[0]) is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        door.set("knock/1", json.dumps(newcomer))
        me = Attendee(newcomer, CARD, door, rules)
        return Gathering(me, None, known=last).attend(door, token.decode())

    host = Attendee(last.contacts[0], CARD, door, rules, Standing(last))
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(come)
        agreed = Gathering(host, (7,), admits=True).hold()
        assert list(agreed.generation.contacts.values()) == [last.contacts[0], newcomer]
        assert coming.result(60) is not None


def test_workers_meet_again_if_the_one_that_held_the_meeting_is_lost_as_they_connect() -> None:
    last = generation(3, [0])
    me = Attendee(last.contacts[0], CARD, local_store(), Rules(1, 4, 30.0), Standing(last))
    connected = IdentityCommunicator()
    numbers: list[int] = []

    def connect(store: Any, rank: int, size: int, seconds: float, number: int) -> Any:
        numbers.append(number)
        if len(numbers) == 1:
            raise DistNetworkError("The connection to rank 0 broke.")
        return connected

    met = ElasticMembers(me, connect)._settled(Agreed(last, me.door, "token"), (3,), [0], 0.0)

    assert met.communicator is connected
    assert numbers == [3, met.generation]


def test_a_worker_that_finds_no_job_to_join_says_where_it_has_looked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UNISONO_JOIN", "127.0.0.1:1, [::1]:2")
    monkeypatch.setattr(finding, "_JOIN_SECONDS", 0.0)

    with pytest.raises(CommunicationError, match=r"127\.0\.0\.1:1, \[::1\]:2.*unset UNISONO_JOIN"):
        finding.running_job(ALONE)
    monkeypatch.delenv("UNISONO_JOIN")
    assert finding.running_job(ALONE) is None


def test_a_worker_that_joins_has_the_constants_of_the_job_before_it_can_be_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, running = finding.open_door(ALONE, "127.0.0.1"), generation(3, [0])
    link = Link(1e-6, 1e9, 1e-6)
    tuning = Tuning(link, link, None, None, None, 1e9, {"cpu": "one"}, "today", "1").to_text()
    job.set("generation", running.to_text())
    job.set("tuning", tuning)
    monkeypatch.setenv("UNISONO_JOIN", f"127.0.0.1:{job.port}")
    found = []

    def joined(members: ElasticMembers, _: Generation) -> bool:
        found.extend(members._me.door.look(["tuning"]))
        return True

    monkeypatch.setattr(ElasticMembers, "joined", joined)
    members, told = join_elastic(ALONE, cpu_slots(1), CommunicationOptions(), 4)

    assert found == [tuning.encode()]
    assert told is not None
    assert told.to_text() == tuning
    members._me.door.close()
    job.close()
