"""Collects events while a trace is recorded, in one lane per thread, so that no thread waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeAlias

# A monotonic clock, in nanoseconds.
Clock: TypeAlias = Callable[[], int]
# Start, end, category, name and arguments of a span.
RawEvent: TypeAlias = tuple[int, int, str, str, dict[str, Any]]

_EVENTS_PER_CHUNK = 1024


class Lane:
    """The last events of one thread, or of several of one name that came one after another.

    Plain lists hold them: start, end, category, name, the number of arguments, their names, their
    values. With one object per event, the garbage collector would scan all of them again and again,
    which takes longer than recording.
    """

    def __init__(self, thread: threading.Thread, max_events: int) -> None:
        self.thread = thread
        self.count = 0
        self._chunk_events = max(1, min(_EVENTS_PER_CHUNK, max_events // 2))
        self._chunk: list[Any] = []
        # A list can be copied in one operation while its thread adds to it.
        self._chunks = [self._chunk]
        self._max_chunks = max_events // self._chunk_events

    def add(
        self, start: int, end: int, category: str, name: str, arguments: dict[str, Any]
    ) -> None:
        """Adds an event in one instruction, because a replica may be stopped between any two."""
        self._chunk.extend(
            (start, end, category, name, len(arguments), *arguments, *arguments.values())
        )
        self.count += 1
        if self.count % self._chunk_events == 0:
            self._chunk = []
            self._chunks.append(self._chunk)
            del self._chunks[: -self._max_chunks]

    def events(self) -> Iterator[RawEvent]:
        """Yields the events, in the order in which they ended."""
        # Copies, each made in one operation, because other threads may still end a span.
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
    """Collects events of all threads. No thread waits for another."""

    def __init__(self, clock: Clock, max_events: int) -> None:
        self.clock = clock
        self.lanes: list[Lane] = []
        self._max_events = max_events
        self._own = threading.local()
        self._lock = threading.Lock()

    def add(self, start: int, category: str, name: str, arguments: dict[str, Any]) -> None:
        """Adds an event of the calling thread that began at `start` and ends now."""
        end = self.clock()
        try:
            lane: Lane = self._own.lane
        except AttributeError:
            lane = self._own.lane = self._lane(threading.current_thread())
        lane.add(start, end, category, name, arguments)

    def _lane(self, thread: threading.Thread) -> Lane:
        """Returns a lane for a new thread, if possible that of an ended thread with its name."""
        lane = self._taken_over(thread)
        if lane is None:
            lane = Lane(thread, self._max_events)
            self.lanes.append(lane)
        return lane

    def _taken_over(self, thread: threading.Thread) -> Lane | None:
        # Does not wait: a replica may have been stopped while it held this lock.
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
