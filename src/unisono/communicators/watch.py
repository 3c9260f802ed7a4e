"""The view of one rank on all others: what each is doing, and what has gone wrong.

Every rank has a line to the hub on rank 0, which decides what has gone wrong: a connection, or a
part of one that a Gloo group has. Ranks say nothing on it while all goes well. The first rank that
finds something wrong tells the hub, and all ranks raise the error that the hub returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch._C._distributed_c10d import Store

from unisono.communicators import hub
from unisono.communicators.gloo import GlooMaker
from unisono.communicators.gloo_stream import GlooStream
from unisono.communicators.headers import Header
from unisono.communicators.hosts import host_identity
from unisono.communicators.joining import join_star
from unisono.communicators.lines import Lines, Stream
from unisono.errors import CommunicationError, WorkerLostError, WorkerTimeoutError

# The rank reports a collective that takes longer to the hub.
PATIENCE_SECONDS = 0.5
# How often a long wait looks for news; also how long Ctrl-C may wait.
_SLICE_SECONDS = 0.1
# How long after the end of its time a rank waits for the hub to say who is at fault.
_GRACE_SECONDS = 5.0


class Watch:
    """Tells the hub what goes wrong on this rank, and knows what has gone wrong on any.

    All ranks make it at the same time.

    Args:
        store: One store, or one prefix of it, serves one watch.
        streams: Carry the messages, between rank 0 and each other one; connected if not given.
        may_leave: Whether a rank may close this before the others do.

    Attributes:
        doing: The collective that this rank is in.
        sequence: The number of the last collective that this rank has begun.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout_seconds: float,
        joining_seconds: float | None = None,
        streams: Mapping[int, Stream] | None = None,
        may_leave: bool = False,
    ) -> None:
        self.doing: Header | None = None
        self.sequence = 0
        self.timeout_seconds = timeout_seconds
        self._rank = rank
        # Other ranks may still join with it, and on rank 0 its server ends with the store.
        self._store = store
        self._deadline = 0.0
        self._failure: CommunicationError | None = None
        self._end_of_hub: str | None = None
        self._hub_closed_after: int | None = None
        self._is_well = False
        self._is_closed = False
        self._has_failed = False
        self._news = threading.Condition()
        self._may_leave = may_leave
        sockets = streams or join_star(
            store,
            rank,
            size,
            timeout_seconds=timeout_seconds,
            joining_seconds=timeout_seconds if joining_seconds is None else joining_seconds,
        )
        self._say: Callable[..., None]
        if rank == 0:
            made = hub.Hub(sockets, self._heard, may_leave=may_leave)
            self._say = made.hear
            self._end: Callable[[], None] = lambda: made.close(self.sequence)
            made.start()
        else:
            lines = Lines(sockets, self._heard, self._ended)
            self._say, self._end = partial(lines.send, 0), lines.close
            lines.start()
        self._tell("here", host_identity())

    def wait(
        self, finished: Callable[[float], bool], awaited: Callable[[], Sequence[int]] = tuple
    ) -> None:
        """Waits for the end of something, or raises if a rank is lost or late, or has failed.

        Args:
            finished: Waits for so many seconds, and returns whether it is done.
            awaited: Returns the ranks that this one waits for, as far as it knows.
        """
        self._deadline = time.monotonic() + self.timeout_seconds
        if finished(PATIENCE_SECONDS):
            return
        self._tell("waits")
        while not finished(_SLICE_SECONDS):
            self.raise_failure()
            if self._hub_closed_after is not None and self._hub_closed_after < self.sequence:
                raise self._lost_hub(hub.CLOSED)
            if time.monotonic() > self._deadline:
                late, seconds = list(awaited()), self.timeout_seconds
                own = hub.timed_out(self._rank, seconds, self._in_words(), late, "")
                raise self._decided(own, "late", seconds, late)

    def broken(self, peer: int | None, why: str) -> CommunicationError:
        """Returns the error for a connection that broke, to `peer` if that is known."""
        own = WorkerLostError(f"A connection broke ({why}). Check the network between the hosts.")
        if peer is not None:
            own = hub.lost({peer: f"broke its connection ({why})"}, "")
        return self._decided(own, "broke", peer, why)

    @contextmanager
    def collective(self, header: Header) -> Iterator[None]:
        """Surrounds a collective: says that this rank is in it, and tells others if it fails."""
        self.raise_failure()
        self.sequence, self.doing = header.sequence, header
        self._deadline = time.monotonic() + self.timeout_seconds
        try:
            with self.published_errors(), self.told_exits(header):
                yield
        finally:
            self.doing = None

    @contextmanager
    def told_exits(self, header: Header) -> Iterator[None]:
        """Tells all ranks if this one leaves a collective with another error."""
        try:
            yield
        except CommunicationError:
            raise
        except BaseException as error:
            left = f"Rank {self._rank} left {header} with {type(error).__name__}."
            # Not for long: a user who has pressed Ctrl-C wants to leave.
            self._deadline = 0.0
            self.published(WorkerLostError(left, [self._rank]))
            raise

    @contextmanager
    def published_errors(self) -> Iterator[None]:
        """Tells all ranks of a `CommunicationError`, and raises the first that a rank reported."""
        try:
            yield
        except CommunicationError as error:
            raise self.published(error) from error.__cause__

    @property
    def failure(self) -> CommunicationError | None:
        """The error of all ranks, if there is one."""
        return self._failure

    @property
    def has_failed(self) -> bool:
        """Whether there is such an error, or was one before this was closed."""
        return self._has_failed or self._failure is not None

    def published(self, error: CommunicationError) -> CommunicationError:
        """Tells all ranks of `error`, and returns the first error that a rank has told."""
        return self._decided(error, "failed", type(error).__name__, str(error), error.ranks)

    def raise_failure(self) -> None:
        """Raises the first error that a rank reported, if there is one."""
        # Another thread may close this meanwhile.
        failure = self._failure
        try:
            if failure is not None:
                raise failure
        finally:
            # An error holds this frame. With the error in it, only the garbage collector would
            # free the connections of a communicator that has failed.
            del failure

    def check_health(self, seconds: float | None = None) -> None:
        """Raises if a rank has ended or closed, or if rank 0 does not say so in so many seconds."""
        self.raise_failure()
        with self._news:
            self._is_well = False
            self._tell("asks")
            self._wait_for_news(lambda: self._is_well, seconds or self.timeout_seconds)
            has_left = self._may_leave and self._hub_closed_after is not None
            if self._is_well or self._is_closed or has_left:
                return
            end = self._end_of_hub
            if self._failure is None:
                self._failure = self._lost_hub(end) if end else self._silent_hub()
        self.raise_failure()

    def close(self) -> None:
        """Says goodbye, and ends the connections. May be called twice."""
        with self._news:
            # Other threads may still wait.
            self._is_closed = True
            self._news.notify_all()
        self._tell("goodbye")
        self._end()
        # An error holds the frames that it went through, and so all that a step has used.
        self._has_failed = self.has_failed
        self._failure = self._end_of_hub = None

    # What the main thread makes of what was heard.

    def _decided(self, own: CommunicationError, *message: Any) -> CommunicationError:
        """Tells the hub what this rank has found, and returns what the hub makes of it."""
        with self._news:
            if self._failure is None:
                self._tell(*message)
                left = max(0.0, self._deadline - time.monotonic())
                self._wait_for_news(lambda: False, left + _GRACE_SECONDS)
            if self._is_closed:
                return self._failure or own
            self._failure = self._failure or self._without_hub(own)
            return self._failure

    def _wait_for_news(self, is_enough: Callable[[], bool], seconds: float) -> None:
        def is_over() -> bool:
            return is_enough() or self._is_closed or bool(self._failure or self._end_of_hub)

        self._news.wait_for(is_over, timeout=seconds)

    def _without_hub(self, own: CommunicationError) -> CommunicationError:
        if self._end_of_hub is None:
            return self._silent_hub()
        if self._hub_closed_after is not None and self._hub_closed_after >= self.sequence:
            return own
        # All else follows from the end of rank 0.
        return self._lost_hub(self._end_of_hub)

    def _lost_hub(self, what: str) -> WorkerLostError:
        return hub.lost({0: what}, f"Rank {self._rank} was {self._in_words()}. ")

    def _silent_hub(self) -> WorkerTimeoutError:
        return hub.timed_out(
            self._rank,
            self.timeout_seconds,
            self._in_words(),
            [0],
            "Rank 0, which decides what has gone wrong, does not answer. ",
        )

    def _in_words(self) -> str:
        return hub.in_words(self.sequence, self._collective())

    def _collective(self) -> str | None:
        # Another thread may change it meanwhile.
        doing = self.doing
        return None if doing is None else str(doing)

    def _tell(self, kind: str, *details: Any) -> None:
        self._say(kind, self.sequence, self._collective(), *details)

    # What the thread calls.

    def _heard(self, _: int, message: list[Any]) -> None:
        kind, *details = message
        with self._news:
            if kind == "tell":
                self._tell("does")
            elif kind == "well":
                self._is_well = True
            elif kind == "failure":
                self._failure = self._failure or hub.error_of(*details)
                self._tell("knows")
            elif kind == "goodbye":
                (self._hub_closed_after,) = details
                self._end_of_hub = hub.CLOSED
            self._news.notify_all()

    def _ended(self, _: int, error: OSError | None) -> None:
        with self._news:
            self._end_of_hub = hub.ENDED if self._hub_closed_after is None else hub.CLOSED
            if hub.is_unreachable(error):
                self._end_of_hub = f"cannot be reached ({error})"
                self._failure = self._failure or self._lost_hub(self._end_of_hub)
            self._news.notify_all()


def make_watch(
    store: Store, rank: int, size: int, gloo: GlooMaker | None, **options: Any
) -> tuple[Watch, Any]:
    """Returns a watch, and the group of all ranks that `gloo` makes, if it is given.

    The watch over a group uses the connections that the group has. Until they exist, one with its
    own connections tells who is lost.
    """
    watch = Watch(store, rank, size, may_leave=gloo is not None, **options)
    if gloo is None:
        return watch, None
    try:
        group = gloo(watch.check_health)
    finally:
        watch.close()
    streams = {peer: GlooStream(group, peer) for peer in ([0] if rank else range(1, size))}
    return Watch(store, rank, size, streams=streams, **options), group
