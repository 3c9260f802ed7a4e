"""Time cut into pieces: what a thread was doing at each moment, and who it waited for.

step     |-----------------------------|        of the innermost spans each moment has one,
replica    |------------------------|           and a piece is where that does not change:
wait              |------|                      step, replica, wait, replica, step
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from unisono_tools.traces.files import Event, WorkerTrace


class Segment(NamedTuple):
    """A piece of time, and the innermost span in it."""

    start: int
    end: int
    event: Event


class Segments:
    """The pieces of one thread, in order."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._all = list(_cut(events))
        self._starts = [segment.start for segment in self._all]

    def within(self, start: int, end: int) -> Iterator[Segment]:
        """Yields the pieces between two moments, cut off there."""
        at = max(0, bisect_right(self._starts, start) - 1)
        for segment in self._all[at : bisect_left(self._starts, end)]:
            begin, stop = max(start, segment.start), min(end, segment.end)
            if begin < stop:
                yield segment._replace(start=begin, end=stop)


def _cut(events: Sequence[Event]) -> Iterator[Segment]:
    """Cuts spans that lie in each other, by start, into pieces."""
    open_: list[Event] = []
    now = 0
    for event in events:
        while open_ and open_[-1].end <= event.start:
            ended = open_.pop()
            if now < ended.end:
                yield Segment(now, ended.end, ended)
                now = ended.end
        if open_ and now < event.start:
            yield Segment(now, event.start, open_[-1])
        now = event.start
        open_.append(event)
    for ended in reversed(open_):
        if now < ended.end:
            yield Segment(now, ended.end, ended)
            now = ended.end


class Block(NamedTuple):
    """A piece of time in which a worker waits in a collective for `rank`, which comes last."""

    start: int
    end: int
    rank: int


def blocks(workers: Sequence[WorkerTrace]) -> dict[int, list[Block]]:
    """Returns, by worker, when its collectives wait for another worker, in order."""
    calls: dict[tuple[int, int], dict[int, Event]] = {}
    for worker in workers:
        for event in worker.events():
            if event.category == "collective":
                key = event.arguments["group"], event.arguments["number"]
                calls.setdefault(key, {})[worker.rank] = event
    found: dict[int, list[Block]] = {worker.rank: [] for worker in workers}
    for call in calls.values():
        last = max(call, key=lambda rank: call[rank].start)
        for rank, event in call.items():
            end = min(call[last].start, event.end)
            if rank != last and event.start < end:
                found[rank].append(Block(event.start, end, last))
    return {rank: sorted(own) for rank, own in found.items()}


def split(start: int, end: int, blocked: Sequence[Block]) -> Iterator[tuple[int, int | None]]:
    """Yields parts of a piece of time: how long, and the worker that was waited for, if any."""
    now = start
    first = max(0, bisect_left(blocked, (start,)) - 1)
    for number in range(first, len(blocked)):
        block = blocked[number]
        if block.start >= end:
            break
        begin, stop = max(now, block.start), min(end, block.end)
        if begin < stop:
            yield begin - now, None
            yield stop - begin, block.rank
            now = stop
    yield end - now, None
