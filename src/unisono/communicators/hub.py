"""Where all ranks tell what goes wrong, and where the cause is found.

The hub is on rank 0, with a connection to every other rank. It decides between what ranks tell,
so all of them raise the same error: the cause that came first. Ranks send

    here       at the start; on which host they are
    waits      a collective has taken half a second
    late       a collective has taken `timeout_seconds`; for which ranks they wait, if they know
    broke      a connection between ranks broke; to which rank, if they know, and why
    failed     a collective failed for another reason: the error
    asks       whether all ranks are well
    does       the answer to `tell`
    knows      the answer to `failure`
    goodbye    the communicator is closed

with the number of the last collective that they have begun, and which one they are in, if they are
in one. The hub sends

    tell       what are you doing?
    well       all ranks are well
    failure    an error, to all ranks
    goodbye    rank 0 closes its communicator, after which nobody decides

There are no heartbeats. A process has ended when its connection is closed. A host is gone when it
has not answered the kernel's keepalive for `timeout_seconds`. The connections of a Gloo group have
no keepalive: there such a host is late. A process that is paused or computes is late, not lost.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from unisono import errors
from unisono.communicators.headers import ranks_in_words
from unisono.communicators.lines import Lines, Stream
from unisono.errors import CommunicationError, WorkerLostError, WorkerTimeoutError

# How long to wait for ranks to tell what they do, before an error says it of all.
_ANSWER_SECONDS = 2.0
# How a rank has ended, in words.
CLOSED, ENDED, _CUT_OFF = "has closed its communicator", "has ended", "cannot be reached"
_NO_WAY = (
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.EHOSTDOWN,
    errno.ENETUNREACH,
    errno.ENETDOWN,
    errno.ENETRESET,
)


def is_unreachable(error: OSError | None) -> bool:
    """Whether a connection has ended because the other host does not answer."""
    return error is not None and error.errno in _NO_WAY


def error_of(kind: str, text: str, ranks: Iterable[int]) -> CommunicationError:
    """Returns an error that a rank has sent."""
    error: CommunicationError = getattr(errors, kind)(text, ranks)
    return error


def lost(what: Mapping[int, str], others: str) -> WorkerLostError:
    """Returns the error for ranks that are lost."""
    ranks = sorted(what)
    one_each = "; ".join(f"rank {rank} {what[rank]}" for rank in ranks)
    return WorkerLostError(
        f"Lost {ranks_in_words(ranks)}: {one_each}. {others}Check its log, and start the workers "
        "again.",
        ranks,
    )


@dataclass
class _Rank:
    """What the hub knows of a rank; `end` says how it has ended, if it has."""

    host: str = ""
    sequence: int = 0
    collective: str | None = None
    waits_in: int = 0
    end: str = ""


class Hub:
    """Decides for all ranks what has gone wrong."""

    def __init__(
        self,
        sockets: Mapping[int, Stream],
        tell_own: Callable[[int, list[Any]], None],
        *,
        may_leave: bool = False,
    ) -> None:
        self._may_leave = may_leave
        self._ranks = {rank: _Rank() for rank in range(len(sockets) + 1)}
        self._tell_own = tell_own
        self._cause: Callable[[], CommunicationError] | None = None
        self._unanswered: set[int] = set()
        self._verdict: list[Any] = []
        self._untold: set[int] = set()
        self._is_told = False
        self._lines = Lines(sockets, self._heard, self._ended)

    def start(self) -> None:
        """Begins to listen, which may call `tell_own` at once."""
        self._lines.start()

    def hear(self, *message: Any) -> None:
        """Takes a message of rank 0."""
        self._lines.call(partial(self._heard, 0, list(message)))

    def close(self, sequence: int) -> None:
        """Tells all other ranks that rank 0 closes, after it has begun so many collectives."""
        for rank in self._ranks:
            self._lines.send(rank, "goodbye", sequence)
        self._lines.close()

    def _send(self, rank: int, *message: Any) -> None:
        if rank == 0:
            self._tell_own(0, list(message))
        else:
            self._lines.send(rank, *message)

    def _heard(self, rank: int, message: list[Any]) -> None:
        kind, sequence, collective, *details = message
        one = self._ranks[rank]
        one.sequence, one.collective = sequence, collective
        if kind == "here":
            (one.host,) = details
        elif kind == "waits":
            one.waits_in = sequence
            self._look_for_leavers()
        elif kind == "late":
            self._find(
                partial(self._late, rank, sequence, in_words(sequence, collective), *details)
            )
        elif kind == "broke":
            self._find(partial(self._broken, sequence, *details))
        elif kind == "failed":
            self._find(partial(error_of, *details), asks=False)
        elif kind == "asks":
            self._say_whether_all_are_well(rank)
        elif kind == "goodbye":
            one.end = CLOSED
            self._look_for_leavers()
        # What was sent before it was asked for is no answer.
        if kind in ("does", "knows", "goodbye"):
            self._no_answer_is_needed_of(rank)

    def _ended(self, rank: int, error: OSError | None) -> None:
        one = self._ranks[rank]
        if not one.end:
            one.end = _CUT_OFF if is_unreachable(error) else ENDED
            # A rank that waits for a process that has ended finds its connection broken. One that
            # only ends without a goodbye, after the last collective, is no failure.
            if one.end == _CUT_OFF:
                self._find(partial(self._lost, [rank]))
        self._no_answer_is_needed_of(rank)

    # How a cause becomes an error.

    def _find(self, cause: Callable[[], CommunicationError], *, asks: bool = True) -> None:
        """Takes the first cause, and asks all ranks what they do before it sends it."""
        if self._cause is not None:
            return
        self._cause = cause
        if asks:
            self._unanswered = self._present()
            for rank in tuple(self._unanswered):
                self._send(rank, "tell")
            self._lines.call_after(_ANSWER_SECONDS, self._decide)
        self._decide(self._unanswered)

    def _no_answer_is_needed_of(self, rank: int) -> None:
        if self._verdict:
            self._untold.discard(rank)
            self._tell_own_rank()
        elif self._cause is not None:
            self._unanswered.discard(rank)
            self._decide(self._unanswered)

    def _decide(self, awaited: Collection[int] = ()) -> None:
        if self._verdict or self._cause is None or awaited:
            return
        error = self._cause()
        self._verdict = ["failure", type(error).__name__, str(error), error.ranks]
        # A rank that is silent may not answer this, either.
        self._untold = self._present() - self._unanswered - {0}
        for rank in range(1, len(self._ranks)):
            self._lines.send(rank, *self._verdict)
        self._lines.call_after(_ANSWER_SECONDS, partial(self._tell_own_rank, is_last_time=True))
        self._tell_own_rank()

    def _tell_own_rank(self, *, is_last_time: bool = False) -> None:
        """Tells rank 0 once the others know: it may break the connections that carry the news."""
        if (is_last_time or not self._untold) and not self._is_told:
            self._is_told = True
            self._tell_own(0, self._verdict)

    def _present(self) -> set[int]:
        return {rank for rank, one in self._ranks.items() if not one.end}

    def _gone(self) -> list[int]:
        """Returns the ranks that have ended without a goodbye."""
        return [rank for rank, one in self._ranks.items() if one.end in (ENDED, _CUT_OFF)]

    def _closed_before(self, sequence: int) -> list[int]:
        """Returns the ranks that have closed before collective number `sequence`."""
        ranks = self._ranks.items()
        return [rank for rank, one in ranks if one.end == CLOSED and one.sequence < sequence]

    def _look_for_leavers(self) -> None:
        """Finds ranks that have closed before a collective for which another waits."""
        if leavers := self._closed_before(max(one.waits_in for one in self._ranks.values())):
            self._find(partial(self._lost, leavers))

    def _say_whether_all_are_well(self, asker: int) -> None:
        gone = self._gone() if self._may_leave else self._ranks.keys() - self._present()
        if gone:
            self._find(partial(self._lost, gone))
        else:
            self._send(asker, "well")

    def _late(
        self, asker: int, sequence: int, doing: str, seconds: float, awaited: list[int]
    ) -> CommunicationError:
        if gone := self._gone():
            return self._lost(gone)
        late = self._latest(sequence) or awaited
        return timed_out(asker, seconds, doing, late, self._what_all_do())

    def _latest(self, sequence: int) -> list[int]:
        """Returns the ranks that keep others waiting who are in collective number `sequence`."""
        late = {rank: one for rank, one in self._ranks.items() if one.sequence < sequence}
        # Ranks that wait in an earlier collective are kept from this one themselves.
        idle = [r for r, one in late.items() if r in self._unanswered or one.collective is None]
        first = min((one.sequence for one in late.values()), default=0)
        return idle or [rank for rank, one in late.items() if one.sequence == first]

    def _broken(self, sequence: int, peer: int | None, why: str) -> CommunicationError:
        gone = self._gone()
        gone += self._closed_before(sequence) if peer is None else [peer]
        if gone:
            return self._lost(gone, why)
        return WorkerLostError(
            f"A connection broke ({why}), though all {len(self._ranks)} ranks are alive. "
            f"{self._what_all_do()}Check the network between the hosts."
        )

    def _lost(self, ranks: Iterable[int], why: str = "") -> CommunicationError:
        # A host that is gone takes all its ranks along, some of which are found out later.
        silent = {r for r in self._ranks if self._what_happened_to(r, "") == _CUT_OFF}
        hosts = {self._ranks[rank].host for rank in ranks if rank in silent}
        lost_too = {rank for rank in silent if self._ranks[rank].host in hosts}
        what = {rank: self._what_happened_to(rank, why) for rank in {*ranks, *lost_too}}
        return lost(what, self._what_all_do())

    def _what_happened_to(self, rank: int, why: str) -> str:
        silent = _CUT_OFF if rank in self._unanswered else ""
        broken = f"lives, but a connection to it broke ({why})"
        return self._ranks[rank].end or silent or broken

    def _what_all_do(self) -> str:
        doing = "; ".join(
            f"rank {rank}: {in_words(one.sequence, one.collective)}"
            + (" (does not answer now)" if rank in self._unanswered else "")
            for rank, one in self._ranks.items()
        )
        return f"Last heard: {doing}. "


def in_words(sequence: int, collective: str | None) -> str:
    """Returns what a rank does that has begun so many collectives."""
    if collective is not None:
        return f"in {collective}"
    return f"between collectives, after number {sequence}"


def timed_out(
    asker: int, seconds: float, doing: str, late: Iterable[int], others: str
) -> WorkerTimeoutError:
    """Returns the error for a rank that has waited in vain."""
    late = list(late)
    who = f" for {ranks_in_words(late)}" if late else ""
    return WorkerTimeoutError(
        f"Rank {asker} waited {seconds:g} s {doing}{who}. {others}Raise `timeout_seconds` if a "
        "rank is slow.",
        late,
    )
