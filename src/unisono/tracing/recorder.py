"""Collects events while a trace is recorded, and writes them into one file per worker.

Each thread has its own lane of events, so that no thread waits.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from unisono.arguments import check_instance
from unisono.errors import TraceError
from unisono.system import boot_id, namespace
from unisono.tracing.spans import Place

# A monotonic clock, in nanoseconds.
Clock: TypeAlias = Callable[[], int]
# Start, end, category, name and arguments of a span.
RawEvent: TypeAlias = tuple[int, int, str, str, dict[str, Any]]

FORMAT = "unisono trace 1"
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
                arguments = dict(zip(keys, islice(items, number), strict=True))
                yield start, end, category, name, arguments


class Recorder:
    """Collects events of all threads."""

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
        # Does not wait: a replica may have been stopped while it held this lock.
        if self._lock.acquire(blocking=False):
            try:
                for lane in self.lanes:
                    if lane.thread.name == thread.name and not lane.thread.is_alive():
                        lane.thread = thread
                        return lane
            finally:
                self._lock.release()
        self.lanes.append(lane := Lane(thread, self._max_events))
        return lane

    def write(self, folder: Path, place: Place) -> None:
        """Writes the file of a worker atomically: whose it is, then one line per event."""
        lanes = list(self.lanes)
        # First, because a thread may still end a span and add an event.
        counts = [lane.count for lane in lanes]
        kept = [list(lane.events()) for lane in lanes]
        header = {
            "format": FORMAT,
            "rank": place.rank,
            "size": place.size,
            "host": socket.gethostname(),
            "process": os.getpid(),
            "clock": _clock_name(self.clock),
            "num_dropped": sum(max(0, n - len(own)) for n, own in zip(counts, kept, strict=True)),
            "threads": [lane.thread.name for lane in lanes],
        }
        path = folder / f"worker-{place.rank}.jsonl"
        unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
        with unfinished.open("w") as file:
            file.write(json.dumps(header) + "\n")
            for number, events in enumerate(kept):
                for event in events:
                    file.write(json.dumps([number, *event], default=str) + "\n")
        unfinished.replace(path)


def _clock_name(clock: Clock) -> str:
    """Returns a name for a clock, the same in all processes that read the same clock."""
    boot, offset = boot_id(), namespace("time")
    if clock is time.perf_counter_ns and boot and offset:
        return f"{boot} {offset}"
    return f"of process {os.getpid()} on {socket.gethostname()}"


def check_folder(folder: Any) -> Path:
    """Returns the path of a folder."""
    check_instance("folder", folder, (str, os.PathLike), "the path of a folder")
    path = Path(folder)
    if "\0" in str(path):
        raise TraceError(f"A path cannot have a NUL character, got {path!r}. Remove it.")
    return path
