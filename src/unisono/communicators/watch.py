"""Who is alive, what each rank is doing, and what has gone wrong.

A thread of each rank tells the store every half second that its rank lives and what it is doing.
Nobody reads that until a collective waits for long. So a collective that goes well costs nothing,
and one that does not ends with the names of the ranks at fault. That a process of one's own host
has ended is seen at once; on another host it is only not heard any more.

The first rank that fails publishes its error, and all others raise the same.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

from unisono import errors
from unisono.communicators.headers import Header, ranks_in_words
from unisono.communicators.hosts import has_ended, sign_of
from unisono.communicators.stores import OwnConnection, coordinator_lost
from unisono.errors import CommunicationError, WorkerLostError, WorkerTimeoutError

# A collective that takes longer is looked at.
PATIENCE_SECONDS = 0.5
# How often it is looked at then; also how long Ctrl-C may wait.
_SLICE_SECONDS = 0.1
# After a broken connection, or a question about health, everybody should be heard within this.
_ANSWER_SECONDS = 3.0
# A rank that is silent for as long, while others wait for it, is lost.
_SILENCE_SECONDS = 10.0
_NO_FAILURE = "none"


class BrokenConnectionError(Exception):
    """What carries a collective has failed, for a reason that the watch is to find."""


@dataclass
class _Heard:
    """What was last heard of a rank, and when."""

    beat: int = -1
    time: float = 0.0
    doing: str = ""
    sequence: int = 0
    closed: bool = False
    ended: bool = False


class Watch:
    """The view of one rank on all others.

    Attributes:
        doing: The collective that this rank is in, or None.
        sequence: The number of the last collective that this rank has begun.
    """

    def __init__(self, store: Store, rank: int, size: int, *, timeout_seconds: float) -> None:
        self.doing: Header | None = None
        self.sequence = 0
        self.timeout_seconds = timeout_seconds
        self._rank = rank
        self._size = size
        self._sign = sign_of(os.getpid())
        # Many ranks look less often, so that the store has no more to do.
        self._interval = 0.5 + size / 200
        self._silence = min(_SILENCE_SECONDS, max(timeout_seconds / 2, 4 * self._interval))
        self._connection = OwnConnection(store, timeout_seconds=self._silence)
        self._store = self._connection.store
        self._heard = [_Heard() for _ in range(size)]
        self._unheard = set(range(size))
        self._failure: CommunicationError | None = None
        self._unreachable: CommunicationError | None = None
        self._outgoing: CommunicationError | None = None
        self._lookers = 0
        self._last_look = 0.0
        self._beat = 0
        self._closing = False
        self._wake = threading.Event()
        self._looked = threading.Condition()
        self._store.compare_set("failure", "", _NO_FAILURE)
        self._tell()
        self._thread = threading.Thread(target=self._run, name=f"unisono watch {rank}", daemon=True)
        self._thread.start()

    def wait(self, finished: Callable[[float], bool]) -> None:
        """Waits until `finished`, which is given the seconds to wait, says so.

        Raises:
            CommunicationError: if a rank is lost or late, or another rank has failed.
        """
        try:
            if finished(PATIENCE_SECONDS):
                return
            deadline = time.monotonic() + self.timeout_seconds - PATIENCE_SECONDS
            with self._looking() as since:
                while not finished(_SLICE_SECONDS):
                    self._raise_if_hopeless(since)
                    if time.monotonic() > deadline:
                        raise self.published(self._late())
        except BrokenConnectionError as error:
            raise self._explanation(error) from error

    @contextmanager
    def collective(self, header: Header) -> Iterator[None]:
        """Surrounds a collective: says that this rank is in it, and tells others if it fails."""
        self.raise_failure()
        self.sequence, self.doing = header.sequence, header
        try:
            with self.published_errors():
                yield
        except CommunicationError:
            raise
        except BaseException as error:
            left = f"Rank {self._rank} left {header} with {type(error).__name__}."
            self.published(WorkerLostError(left, [self._rank]))
            raise
        finally:
            self.doing = None

    @contextmanager
    def published_errors(self) -> Iterator[None]:
        """Tells all ranks of a `CommunicationError`, and raises the first that was told."""
        try:
            yield
        except CommunicationError as error:
            raise self.published(error) from error.__cause__

    @property
    def failure(self) -> CommunicationError | None:
        """The first error that a rank has told, if one has."""
        return self._failure

    def published(self, error: CommunicationError) -> CommunicationError:
        """Tells all ranks of `error`, and returns the first error that a rank has told."""
        with self._looked:
            # Where the coordinator was out of reach before, all else follows from that.
            error = self._unreachable or error
            self._outgoing = self._outgoing or error
            self._wake.set()
            if not self._looked.wait_for(
                lambda: self._failure or self._unreachable, timeout=_ANSWER_SECONDS
            ):
                # What looks like a lost rank may be that all of this host is cut off.
                found = f"no answer for {_ANSWER_SECONDS:g} s to: {error}"
                error = self._unreachable = coordinator_lost(found)
            self._failure = self._failure or error
        return self._failure

    def raise_failure(self) -> None:
        """Raises the first error that was told, if there is one."""
        if self._failure is not None:
            raise self._failure

    def check_health(self) -> None:
        """Raises unless every rank is heard now."""
        silent = self._silent_ranks()
        self.raise_failure()
        if self._unreachable is not None:
            raise self._unreachable
        if ended := self._ended_ranks():
            raise self.published(self._lost(ended, "has ended"))
        if silent:
            raise self.published(self._lost(silent, "was not heard when asked for"))

    def close(self) -> None:
        """Says goodbye, and ends the thread."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=1.0)
        if self._thread.is_alive():
            self._connection.cut()
            self._thread.join()
        # An error holds the frames that it went through, and so all that a step has used.
        self._failure = self._outgoing = self._unreachable = None

    # What the main thread makes of what was heard.

    def _raise_if_hopeless(self, since: float) -> None:
        self.raise_failure()
        if self._unreachable is not None:
            raise self.published(self._unreachable)
        now = time.monotonic()
        unanswered = now - max(since, self._last_look)
        if unanswered > self._silence:
            raise self.published(coordinator_lost(f"no answer for {unanswered:.0f} s"))
        if gone := self._gone():
            raise gone
        if silent := [
            rank
            for rank, heard in enumerate(self._heard)
            if rank != self._rank and now - max(since, heard.time) > self._silence
        ]:
            what = f"has given no sign of life for {self._silence:.0f} s"
            raise self.published(self._lost(silent, what))

    def _gone(self) -> CommunicationError | None:
        """Tells of the ranks that have left, if any have."""
        if closed := [rank for rank, heard in enumerate(self._heard) if heard.closed]:
            return self.published(self._lost(closed, "has closed its communicator"))
        if ended := self._ended_ranks():
            return self.published(self._lost(ended, "has ended"))
        return None

    def _ended_ranks(self) -> list[int]:
        return [rank for rank, heard in enumerate(self._heard) if heard.ended]

    def _explanation(self, error: BrokenConnectionError) -> CommunicationError:
        """Finds out who is behind a broken connection."""
        silent = self._silent_ranks()
        if known := self._failure or self._unreachable:
            return known
        if gone := self._gone():
            return gone
        if silent:
            return self.published(self._lost(silent, "broke its connection and is gone"))
        return self.published(
            WorkerLostError(
                f"A connection broke, though all {self._size} ranks are alive. "
                f"{self._what_all_do()} Look at the network between the hosts ({error})."
            )
        )

    def _silent_ranks(self) -> list[int]:
        """The ranks that are not heard from now on, within a time."""
        with self._looking() as since, self._looked:

            def silent() -> list[int]:
                # Somebody who has closed is heard of, and will say no more.
                return [
                    rank
                    for rank, heard in enumerate(self._heard)
                    if rank != self._rank and heard.time < since and not heard.closed
                ]

            def is_clear() -> bool:
                is_told = bool(self._failure or self._unreachable)
                return is_told or bool(self._ended_ranks()) or not silent()

            self._looked.wait_for(is_clear, timeout=_ANSWER_SECONDS)
            return silent()

    @contextmanager
    def _looking(self) -> Iterator[float]:
        with self._looked:
            self._lookers += 1
            if self._lookers == 1:
                # What was heard in an earlier look says nothing about now.
                for heard in self._heard:
                    heard.beat = -1
        self._wake.set()
        try:
            yield time.monotonic()
        finally:
            with self._looked:
                self._lookers -= 1

    def _late(self) -> WorkerTimeoutError:
        late = [
            rank
            for rank, heard in enumerate(self._heard)
            if rank != self._rank and heard.sequence < self.sequence
        ]
        who = f" for {ranks_in_words(late)}" if late else ""
        return WorkerTimeoutError(
            f"Rank {self._rank} waited {self.timeout_seconds:g} s {self._in_words()}{who}. "
            f"{self._what_all_do()} Raise `timeout_seconds` if a rank is slow.",
            late,
        )

    def _lost(self, ranks: Sequence[int], what: str) -> WorkerLostError:
        one_each = "; ".join(f"rank {rank} {what}" for rank in ranks)
        return WorkerLostError(
            f"Lost {ranks_in_words(ranks)}: {one_each}. {self._what_all_do()} Look at the log of "
            "what was lost, and start the workers anew.",
            ranks,
        )

    def _what_all_do(self) -> str:
        doing = [heard.doing or "nothing that was heard of" for heard in self._heard]
        doing[self._rank] = self._in_words()
        return "Last heard: " + "; ".join(f"rank {i}: {text}" for i, text in enumerate(doing)) + "."

    def _in_words(self) -> str:
        doing = self.doing
        if doing is not None:
            return f"in {doing}"
        return f"between collectives, after number {self.sequence}"

    # What the thread does, which alone talks to the store.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wake.wait(self._interval if not self._lookers else self._interval / 2)
                self._wake.clear()
                self._tell()
                if self._outgoing is not None and self._failure is None:
                    self._publish(self._outgoing)
                if self._lookers:
                    self._look()
            self._tell()
        except RuntimeError as error:
            with self._looked:
                # Of interest to whoever waits; a coordinator may end after the last collective.
                self._unreachable = coordinator_lost(str(error))
                self._looked.notify_all()

    def _tell(self) -> None:
        self._beat += 1
        state = [self._beat, self.sequence, self._in_words(), self._closing, self._sign]
        self._store.set(_key(self._rank), json.dumps(state))

    def _publish(self, error: CommunicationError) -> None:
        text = json.dumps([type(error).__name__, str(error), error.ranks])
        current = self._store.compare_set("failure", _NO_FAILURE, text).decode()
        with self._looked:
            self._failure = error if current == text else _read_failure(current)
            self._looked.notify_all()

    def _newcomers(self) -> set[int]:
        """The ranks that have told something since they were looked for.

        To read what nobody has written would wait for a rank that may have ended before it did.
        """
        if self._store.check([_key(rank) for rank in self._unheard]):
            return self._unheard
        return {rank for rank in self._unheard if self._store.check([_key(rank)])}

    def _look(self) -> None:
        if self._unheard:
            self._unheard -= self._newcomers()
        present = [rank for rank in range(self._size) if rank not in self._unheard]
        failure, *states = self._store.multi_get(["failure", *map(_key, present)])
        now = time.monotonic()
        with self._looked:
            self._last_look = now
            for rank, state in zip(present, states, strict=True):
                heard = self._heard[rank]
                beat, heard.sequence, heard.doing, heard.closed, sign = json.loads(state)
                if beat != heard.beat:
                    heard.time = now if heard.beat >= 0 else heard.time
                    heard.beat = beat
                elif not heard.closed:
                    heard.ended = has_ended(sign)
            if failure.decode() != _NO_FAILURE:
                self._failure = self._failure or _read_failure(failure.decode())
            self._looked.notify_all()


def _key(rank: int) -> str:
    return f"state/{rank}"


def _read_failure(text: str) -> CommunicationError:
    kind, message, ranks = json.loads(text)
    error: CommunicationError = getattr(errors, kind)(message, ranks)
    return error
