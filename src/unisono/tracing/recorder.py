"""Where events go while a trace is recorded: one lane per thread, so that no thread waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeAlias

# Nanoseconds from anywhere, which never go back.
Clock: TypeAlias = Callable[[], int]
# Start, end, category, name and arguments of a span.
RawEvent: TypeAlias = tuple[int, int, str, str, dict[str, Any]]

_EVENTS_PER_CHUNK = 1024


class Lane:
    """The last events of one thread, or of several of one name that came one after another.

    They lie end to end in plain lists: start, end, category, name, the number of arguments, their
    names, their values. An object for each would make Python's garbage collector look at all of
    them again and again, which takes longer than to record them.

    Args:
        thread: Whose events they are.
        max_events: How many are kept; they are dropped by the chunk.
    """

    def __init__(self, thread: threading.Thread, max_events: int) -> None:
        self.thread = thread
        self.count = 0
        self._chunk_events = max(1, min(_EVENTS_PER_CHUNK, max_events // 2))
        self._chunk: list[Any] = []
        # A list, which can be copied in one operation while its thread adds to it.
        self._chunks = [self._chunk]
        self._max_chunks = max_events // self._chunk_events

    def add(
        self, start: int, end: int, category: str, name: str, arguments: dict[str, Any]
    ) -> None:
        """Notes an event. In one instruction, as a replica may be stopped between any two."""
        self._chunk.extend(
            (start, end, category, name, len(arguments), *arguments, *arguments.values())
        )
        self.count += 1
        if self.count % self._chunk_events == 0:
            self._chunk = []
            self._chunks.append(self._chunk)
            del self._chunks[: -self._max_chunks]

    def events(self) -> Iterator[RawEvent]:
        """Yields what is kept, in the order in which it ended."""
        # Copies, each made in one operation: other threads may still be about to end a span.
        for chunk in self._chunks.copy():
            items = iter(chunk.copy())
            for start in items:
                end, category, name, number = islice(items, 4)
                keys = list(islice(items, number))
                yield (
                    start,
                    end,
                    category,
                    name,
                    dict(zip(keys, islice(items, number), strict=True)),
                )


class Recorder:
    """Takes events from all threads. None ever waits for another.

    Args:
        clock: What tells the time.
        max_events: How many events of each thread are kept; the oldest make room.
    """

    def __init__(self, clock: Clock, max_events: int) -> None:
        self.clock = clock
        self.lanes: list[Lane] = []
        self._max_events = max_events
        self._own = threading.local()
        self._lock = threading.Lock()

    def add(self, start: int, category: str, name: str, arguments: dict[str, Any]) -> None:
        """Notes what has begun at `start` and ends now, on the thread that calls."""
        end = self.clock()
        try:
            lane: Lane = self._own.lane
        except AttributeError:
            lane = self._own.lane = self._lane(threading.current_thread())
        lane.add(start, end, category, name, arguments)

    def _lane(self, thread: threading.Thread) -> Lane:
        """Returns a lane for a new thread: that of an ended one of its name, if there is one."""
        lane = self._taken_over(thread)
        if lane is None:
            lane = Lane(thread, self._max_events)
            self.lanes.append(lane)
        return lane

    def _taken_over(self, thread: threading.Thread) -> Lane | None:
        # Not waited for: a replica may be stopped at any instruction, this lock in its hands.
        if not self._lock.acquire(blocking=False):
            return None
        try:
            for lane in self.lanes:
                if lane.thread.name == thread.name and not lane.thread.is_alive():
                    lane.thread = thread
                    return lane
            return None
        finally:
            self._lock.release()
