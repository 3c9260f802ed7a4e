"""A trace as Chrome's trace events, for Perfetto: one process per worker, one track per thread.

The format is that of the "Trace Event Format" document: `X` is a span, `M` a name, and `s` and `f`
are the ends of an arrow. Times are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from unisono_tools.traces.files import Event, Thread, WorkerTrace, check_workers


def timeline(workers: Sequence[WorkerTrace]) -> dict[str, Any]:
    """Returns the timeline of all `workers`, which must be on one clock; see `align`."""
    check_workers(workers)
    origin = min((event.start for worker in workers for event in worker.events()), default=0)
    num_replicas = max(map(_num_replicas, workers), default=1)
    events = [
        event for worker in workers for event in _Drawn(worker, origin, num_replicas).events()
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "num_workers": workers[0].size,
            "num_dropped": sum(worker.num_dropped for worker in workers),
        },
    }


class _Drawn:
    """One worker.

    Args:
        worker: What it has recorded.
        origin: The time that is 0 in the timeline.
        num_replicas: How many replicas each worker has.
    """

    def __init__(self, worker: WorkerTrace, origin: int, num_replicas: int) -> None:
        self._worker = worker
        self._origin = origin
        self._num_replicas = num_replicas

    def events(self) -> Iterator[dict[str, Any]]:
        """Yields all trace events of the worker."""
        rank = self._worker.rank
        yield self._name("process_name", 0, name=f"worker {rank} ({self._worker.host})")
        yield self._name("process_sort_index", 0, sort_index=rank)
        for number, thread in enumerate(self._worker.threads):
            yield self._name("thread_name", number, name=self._title(thread))
            yield self._name("thread_sort_index", number, sort_index=number)
            for event in thread.events:
                yield self._span(number, event)
        yield from self._arrows()

    def _name(self, kind: str, thread: int, **arguments: Any) -> dict[str, Any]:
        return {
            "ph": "M",
            "name": kind,
            "pid": self._worker.rank,
            "tid": thread,
            "ts": 0,
            "args": arguments,
        }

    def _span(self, thread: int, event: Event) -> dict[str, Any]:
        return {
            "ph": "X",
            "cat": event.category,
            "name": _title_of(event),
            "pid": self._worker.rank,
            "tid": thread,
            "ts": self._time(event.start),
            "dur": event.duration / 1e3,
            "args": event.arguments,
        }

    def _arrows(self) -> Iterator[dict[str, Any]]:
        """Yields arrows from where a pack is filled to where it is exchanged."""
        placed = [
            (event, number)
            for number, thread in enumerate(self._worker.threads)
            for event in thread.events
            if event.name in ("fill pack", "exchange pack")
        ]
        filled: dict[int, tuple[Event, int]] = {}
        for event, thread in sorted(placed, key=lambda one: one[0].start):
            pack = event.arguments["pack"]
            if event.name == "fill pack":
                filled[pack] = event, thread
            elif pack in filled:
                source, source_thread = filled.pop(pack)
                yield self._arrow("s", source_thread, source.end, source)
                yield self._arrow("f", thread, event.start, source)

    def _arrow(self, end: str, thread: int, time: int, source: Event) -> dict[str, Any]:
        return {
            "ph": end,
            "bp": "e",
            "id": f"{self._worker.rank}.{source.start}",
            "cat": "pack",
            "name": "pack",
            "pid": self._worker.rank,
            "tid": thread,
            "ts": self._time(time),
        }

    def _time(self, time: int) -> float:
        return (time - self._origin) / 1e3

    def _title(self, thread: Thread) -> str:
        """Names a thread by the replica that it runs, if it runs one."""
        local_ids = {e.arguments["replica"] for e in thread.events if e.category == "replica"}
        if len(local_ids) != 1:
            return thread.name
        replica = self._worker.rank * self._num_replicas + local_ids.pop()
        is_program = any(event.category == "step" for event in thread.events)
        return f"replica {replica} (program)" if is_program else f"replica {replica}"


def _num_replicas(worker: WorkerTrace) -> int:
    return 1 + max(
        (e.arguments["replica"] for e in worker.events() if e.category == "replica"), default=0
    )


def _title_of(event: Event) -> str:
    """Names a span, with its number if it has one."""
    number = event.arguments.get("step", event.arguments.get("pack"))
    return event.name if number is None else f"{event.name} {number}"
