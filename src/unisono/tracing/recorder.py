"""Where events go while a trace is recorded: one lane a thread, so that no thread waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

# Nanoseconds from anywhere, which never go back.
Clock: TypeAlias = Callable[[], int]
# Start, end, category, name and arguments of a span. A plain tuple is made in a third of the time.
RawEvent: TypeAlias = tuple[int, int, str, str, dict[str, Any]]


class Lane:
    """The last events of one thread, or of several of one name that came one after another.

    Attributes:
        thread: Whose events they are.
        events: The last ones, in the order in which they ended.
        count: How many there were in all.
    """

    def __init__(self, thread: threading.Thread, max_events: int) -> None:
        self.thread = thread
        self.events: deque[RawEvent] = deque(maxlen=max_events)
        self.count = 0

    @property
    def num_dropped(self) -> int:
        """How many events had to make room for later ones."""
        return max(0, self.count - (self.events.maxlen or 0))


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
        lane.events.append((start, end, category, name, arguments))
        lane.count += 1

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
