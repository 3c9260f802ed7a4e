"""Failures at random moments: what is injected, and what every survivor must report."""

from __future__ import annotations

import ctypes
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple

from processes.crew import Crew, Desk
from processes.leftovers import Holdings, settled
from processes.mpi_crew import MpiCrew
from unisono import errors
from unisono.errors import CommunicationError

# What a busy machine may add to any deadline.
SLACK_SECONDS = 20.0
# For how long a worker is paused that is only slow.
PAUSE_SECONDS = 3.0
_DELAYS = (0.0, 0.002, 0.02)
_DOING = re.compile(
    r"all_reduce|reduce_scatter|all_gather|gather|broadcast|share_parts|barrier|allocate|the start|"
    r"between collectives|to start|has not come|not connected|never came|to join|to invite|"
    r"to connect|to answer|"
    r"did not answer|found nobody|cannot be reached|could not connect|does not answer|"
    r"were connected|for the tuning"
)


class Fault(Enum):
    """What happens to one of the workers."""

    KILLED = "killed"
    KILLED_AT_START = "killed while the others connect"
    STOPPED = "stopped, and continued when it is too late"
    PAUSED = "stopped, continued in time, and leaves then"
    LOCKED = "holds the interpreter lock for a while, and leaves then"
    LATE = "late"
    ABSENT = "absent"
    LEAVES = "leaves"
    SHAPE = "another shape"
    DTYPE = "another dtype"
    OP = "another operation"
    ORDER = "another order"
    ROOT = "another root"


UNEQUAL = (Fault.SHAPE, Fault.DTYPE, Fault.OP, Fault.ORDER, Fault.ROOT)
# During these nobody may fail. What ends the collectives is that the culprit leaves afterwards.
HARMLESS = (Fault.PAUSED, Fault.LOCKED)
WAITS = (Fault.STOPPED, Fault.LATE, Fault.ABSENT, Fault.KILLED_AT_START)
_EXPECTED: dict[Fault, tuple[str, ...]] = {
    Fault.KILLED: ("WorkerLostError",),
    # By whom it was seen last decides whether it is lost or has not come.
    Fault.KILLED_AT_START: ("WorkerLostError", "WorkerTimeoutError"),
    Fault.STOPPED: ("WorkerTimeoutError",),
    **dict.fromkeys(HARMLESS, ("WorkerLostError",)),
    Fault.LATE: ("WorkerTimeoutError",),
    Fault.ABSENT: ("WorkerTimeoutError",),
    Fault.LEAVES: ("WorkerLostError",),
    **dict.fromkeys(UNEQUAL, ("UnequalCollectivesError",)),
}


@dataclass(frozen=True)
class Injection:
    """One failure.

    Attributes:
        name: Its own, for messages and keys.
        fault: What happens.
        culprit: The rank that it happens to.
        size: How many ranks there are.
        step: After how many rounds.
        delay: For a signal, how many seconds after the step; with 0, at that very line.
        seed: Of everything that all ranks draw alike.
        seconds: How long to wait for others once the failure has come.
    """

    name: str
    fault: Fault
    culprit: int
    size: int
    step: int
    delay: float
    seed: int
    seconds: float

    def meet(self, desk: Desk, rank: int) -> None:
        """Called by all who come, so that a busy machine makes nobody look absent."""
        desk.store.set(f"{self.name} begins on {rank}", "")
        ranks = [
            one for one in range(self.size) if self.fault is not Fault.ABSENT or one != self.culprit
        ]
        desk.store.wait([f"{self.name} begins on {one}" for one in ranks], timedelta(seconds=60))

    def strike(self, desk: Desk) -> None:
        """Called by the culprit at the moment of the failure."""
        desk.tell(time.monotonic())
        if self.fault is Fault.LOCKED:
            # Unlike `time.sleep` this keeps the lock.
            ctypes.PyDLL(None).usleep(int(PAUSE_SECONDS * 1e6))
        elif self.fault is Fault.PAUSED:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.delay == 0 and (number := self.signal) is not None:
            os.kill(os.getpid(), number)

    def be_late(self, desk: Desk) -> None:
        """Called by a culprit that is late, however late the others have begun to wait."""
        deadline = time.monotonic() + self.seconds + 30
        while not desk.store.check([self.end]) and time.monotonic() < deadline:
            time.sleep(0.05)

    @property
    def seconds_before(self) -> float:
        """How long to wait for others that a busy machine slows down, before the failure."""
        return 30.0 if self.fault in (Fault.STOPPED, Fault.LATE) else self.seconds

    @property
    def end(self) -> str:
        """What is in the store when all others have failed."""
        return f"{self.name} has ended"

    @property
    def leaves(self) -> bool:
        """Whether the culprit leaves after the failure."""
        return self.fault in (Fault.LEAVES, *HARMLESS)

    @property
    def signal(self) -> signal.Signals | None:
        """What is sent to the culprit."""
        if self.fault is Fault.STOPPED:
            return signal.SIGSTOP
        is_killed = self.fault in (Fault.KILLED, Fault.KILLED_AT_START)
        return signal.SIGKILL if is_killed else None


def draw(
    rng: random.Random, name: str, faults: Iterable[Fault], size: int, seconds: float
) -> list[Injection]:
    """Draws the moments and culprits of failures, one each."""
    return [
        Injection(
            name=f"{name}/{number}",
            fault=fault,
            culprit=rng.randrange(size),
            size=size,
            step=rng.randrange(6),
            # It takes longer to connect than to make a collective.
            delay=rng.random() * (0.2 if fault is Fault.KILLED_AT_START else rng.choice(_DELAYS)),
            seed=rng.randrange(1 << 30),
            # Where nobody waits in vain, a busy machine must not look like a failure.
            seconds=seconds if fault in WAITS else 30.0,
        )
        for number, fault in enumerate(faults)
    ]


class Report(NamedTuple):
    """What a worker raised, when, and what it still held some time after."""

    kind: str
    text: str
    ranks: tuple[int, ...]
    time: float
    left: str | None


_allowed: dict[str, Holdings] = {}
_USUAL_GROWTH = Holdings(descriptors=4, threads=2, segments=0, ports=0)


def reported(
    body: Callable[[], None],
    close: Callable[[], None],
    limits: Holdings | None,
) -> Report | None:
    """Calls `body`, which must fail unless this is the culprit who leaves, and looks what is left.

    Args:
        body: What the worker does until it fails.
        close: Gives everything back.
        limits: Of segments and ports, what may always be held; the rest must not grow. None looks
            at nothing.
    """
    told: tuple[str, str, tuple[int, ...]] | None = None
    try:
        body()
    except CommunicationError as error:
        told = type(error).__name__, str(error), error.ranks
    at = time.monotonic()
    close()
    assert time.monotonic() - at < SLACK_SECONDS, "close took long"
    left = None if limits is None else left_over(limits)
    return None if told is None else Report(*told, at, left)


def left_over(limits: Holdings, more: Holdings = _USUAL_GROWTH) -> str | None:
    """Returns what this process holds beyond what it may, in words.

    Args:
        limits: Of segments and ports, what may always be held; the rest must not grow.
        more: By how much the rest may grow.
    """
    allowed = _allowed.get("", limits)
    now = settled(allowed)
    # Libraries keep some threads and files from their first use on, and who serves others has a
    # connection for each that lives. What every failure leaves behind is soon more than these.
    margin = limits._replace(
        descriptors=now.descriptors + more.descriptors, threads=now.threads + more.threads
    )
    _allowed.setdefault("", margin)
    return None if now.is_within(allowed) else f"{now}, allowed are {allowed}"


def inject(
    crew: Crew | MpiCrew,
    injection: Injection,
    function: Callable[..., Report | None],
    seconds_to_notice: float,
    *args: Any,
) -> None:
    """Lets the members of a crew call `function(desk, injection, rank, *args)`, one to its ruin."""
    members = crew.members[: injection.size]
    fault, culprit = injection.fault, members[injection.culprit]
    others = {rank: one for rank, one in enumerate(members) if one is not culprit}
    patience = injection.seconds + 60
    began = time.monotonic()
    for rank, member in enumerate(members):
        if fault is not Fault.ABSENT or member is not culprit:
            member.begin(function, injection, rank, *args)
    if fault is not Fault.ABSENT:
        began = culprit.hear(patience)
        assert isinstance(began, float), f"{injection} failed before its time: {began}"
        if injection.signal is not None and injection.delay > 0:
            time.sleep(injection.delay)
            culprit.send(injection.signal)
    if fault in HARMLESS:
        time.sleep(PAUSE_SECONDS)
        began += PAUSE_SECONDS
        culprit.send(signal.SIGCONT)
    reports = {rank: member.hear(patience) for rank, member in others.items()}
    crew.store.set(injection.end, "")
    if fault is Fault.STOPPED:
        culprit.send(signal.SIGCONT)
    if injection.signal is signal.SIGKILL:
        crew.replace(injection.culprit)
    elif fault is not Fault.ABSENT:
        own = culprit.hear(patience)
        assert (own is None) == injection.leaves, f"{injection}: {own}"
        assert own is None or own.left is None, f"{injection}: {own}"
    limit = began + SLACK_SECONDS + (injection.seconds if fault in WAITS else seconds_to_notice)
    for rank, report in reports.items():
        _check(injection, rank, report, limit)
        if fault in HARMLESS:
            assert report.time > began - 0.5, f"{injection}: rank {rank} did not wait: {report}"
    if fault in UNEQUAL:
        assert all(injection.culprit in report.ranks for report in reports.values()), reports
    elif fault is Fault.KILLED_AT_START:
        # Who waits at the start for one that waits for the culprit may know only of that one.
        named = [injection.culprit in report.ranks for report in reports.values()]
        assert any(named), f"{injection}: {reports}"
    else:
        named = [report.ranks == (injection.culprit,) for report in reports.values()]
        assert all(named), f"{injection}: {reports}"


def _check(injection: Injection, rank: int, report: Report | None, limit: float) -> None:
    told = f"{injection}: rank {rank} reported {report}"
    assert report is not None, told
    assert report.kind in _EXPECTED[injection.fault], told
    assert issubclass(getattr(errors, report.kind), CommunicationError), told
    assert all(
        re.search(rf"ranks? [0-9, and]*\b{one}\b", report.text, re.I) for one in report.ranks
    )
    assert _DOING.search(report.text), told
    assert report.time < limit, f"{report.time - limit:.1f} s too late: {told}"
    assert report.left is None, told
