"""What each replica of a worker spent its time on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from unisono_tools.traces.files import Event, WorkerTrace
from unisono_tools.traces.segments import Block, Segments, split

_KINDS = {
    "replica": "compute",
    "compute": "compute",
    "merge": "compute",
    "reduce": "communication",
    "copy": "communication",
    "collective": "communication",
    "input": "input",
    "step": "other",
}
# What replica 0 does for all replicas while they wait.
_FOR_ALL = {key: _KINDS[key] for key in ("merge", "reduce", "copy", "collective")}


class Spent(NamedTuple):
    """A piece of a replica's time.

    Attributes:
        kind: A field of `Shares`.
        duration: How long it is, in nanoseconds.
        waited_for: The worker that the replica waited for, and the replica, if known.
    """

    kind: str
    duration: int
    waited_for: tuple[int, int | None] | None = None


class WorkerTime:
    """The time of one worker.

    Replica 0 uses the program's thread, and does the work that is done once for all at each
    barrier.

    Args:
        worker: What it has recorded.
        blocked: The times in which its collectives wait for other workers.
    """

    def __init__(self, worker: WorkerTrace, blocked: Sequence[Block]) -> None:
        self._rank = worker.rank
        self._blocked = blocked
        self._events = list(worker.events())
        self._threads = [Segments(thread.events) for thread in worker.threads]
        self._runs: list[dict[int, tuple[Event, int]]] = []
        self._steps: list[Event] = []
        self._waits: list[Event] = []
        self._outside: list[Event] = []
        self._main = 0
        for number, thread in enumerate(worker.threads):
            steps = [event for event in thread.events if event.category == "step"]
            if steps:
                # The program's own thread; should several run steps, the last one counts.
                self._main, self._steps = number, steps
                self._waits = [event for event in thread.events if event.category == "wait"]
                self._outside = list(_top(thread.events))
        self._wait_ends = [event.end for event in self._waits]
        self._collect_runs(worker)

    def _collect_runs(self, worker: WorkerTrace) -> None:
        starts = [step.start for step in self._steps]
        self._runs = [{} for _ in self._steps]
        for number, thread in enumerate(worker.threads):
            for event in thread.events:
                at = bisect_right(starts, event.start) - 1
                if event.category == "replica" and at >= 0 and event.end <= self._steps[at].end:
                    self._runs[at][event.arguments["replica"]] = event, number

    @property
    def num_steps(self) -> int:
        """How many steps were recorded."""
        return len(self._steps)

    @property
    def num_replicas(self) -> int:
        """The number of replicas."""
        return max((max(run, default=-1) for run in self._runs), default=-1) + 1

    def spent(self, replica: int) -> Iterator[Spent]:
        """Yields the pieces of a replica's time: all steps, and the input between them."""
        for step, run in zip(self._steps, self._runs, strict=True):
            if replica in run:
                yield from self._in_step(replica, step, run)
        for event in self._outside:
            if event.category != "step":
                yield from self._on_thread(replica, self._main, event.start, event.end)

    def spent_around_collectives(self) -> Iterator[Spent]:
        """Yields the pieces of time from the first collective to the last, for programs without
        steps.

        For a program that calls torch.distributed itself, only collectives are recorded, so the
        time between them counts as compute.
        """
        events = [event for event in self._events if event.category == "collective"]
        now = min((event.start for event in events), default=0)
        for event in sorted(events, key=lambda event: event.start):
            if event.start > now:
                yield Spent("compute", event.start - now)
            # Collectives of several groups may overlap.
            start, now = max(now, event.start), max(now, event.end)
            yield from self._of_kind("communication", start, now)

    def _in_step(
        self, replica: int, step: Event, run: dict[int, tuple[Event, int]]
    ) -> Iterator[Spent]:
        own, thread = run[replica]
        last = max(run, key=lambda other: run[other][0].end)
        end = run[last][0].end
        yield Spent("other", own.start - step.start + step.end - end)
        yield from self._on_thread(replica, thread, own.start, own.end)
        if end > own.end:
            # It has returned, and the step ends with the last.
            yield Spent("waiting", end - own.end, (self._rank, last))

    def _on_thread(self, replica: int, thread: int, start: int, end: int) -> Iterator[Spent]:
        for piece in self._threads[thread].within(start, end):
            if piece.event.category == "wait":
                yield from self._waiting(replica, piece.start, piece.end)
            else:
                kind = _KINDS.get(piece.event.category, "other")
                yield from self._of_kind(kind, piece.start, piece.end)

    def _of_kind(self, kind: str, start: int, end: int) -> Iterator[Spent]:
        if kind != "communication":
            yield Spent(kind, end - start)
            return
        for duration, rank in split(start, end, self._blocked):
            waited_for = None if rank is None else (rank, None)
            yield Spent(kind if rank is None else "waiting", duration, waited_for)

    def _waiting(self, replica: int, start: int, end: int) -> Iterator[Spent]:
        """Splits a wait: until all have arrived, and while replica 0 works for all of them."""
        at = bisect_right(self._wait_ends, start)
        now = start
        if at < len(self._waits) and self._waits[at].end <= end:
            now = self._waits[at].end
            last = self._waits[at].arguments.get("last")
            # The last to arrive waits until the others wake up.
            waited_for = None if last in (None, replica) else (self._rank, last)
            yield Spent("waiting", now - start, waited_for)
        for piece in self._threads[self._main].within(now, end):
            kind = _FOR_ALL.get(piece.event.category, "waiting")
            yield from self._of_kind(kind, piece.start, piece.end)


def _top(events: Sequence[Event]) -> Iterator[Event]:
    """Yields the events that are not inside another event."""
    end = 0
    for event in events:
        if event.start >= end:
            yield event
            end = event.end
