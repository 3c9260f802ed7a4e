"""Records a trace, of a block or of the whole program."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from unisono.arguments import check_callable, check_int
from unisono.errors import TraceError
from unisono.sharing import computed_once
from unisono.tracing import spans
from unisono.tracing.recorder import Clock, Recorder, check_folder

if TYPE_CHECKING:
    from unisono_tools.traces import Summary, WorkerTrace

# Per thread: about 10,000 steps, and 40 MB.
MAX_EVENTS = 100_000


class Trace:
    """A recording that has ended or is still running.

    Args:
        folder: The folder with the files of all workers.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = check_folder(folder)

    def workers(self) -> list[WorkerTrace]:
        """Returns the events of each worker so far, on one clock."""
        aligned: list[WorkerTrace] = analysis().align(analysis().read_folder(self.folder))
        return aligned

    def summary(self) -> Summary:
        """Returns where the time of the steps went, and which replica the others waited for."""
        summary: Summary = analysis().summarise(self.workers())
        return summary

    def timeline(self) -> dict[str, Any]:
        """Returns a timeline. Perfetto and chrome://tracing open it when it is written as JSON."""
        timeline: dict[str, Any] = analysis().timeline(self.workers())
        return timeline


def analysis() -> ModuleType:
    """Returns the tools that read traces. A program that only records never loads them."""
    from unisono_tools import traces

    return traces


@contextmanager
def record(
    folder: str | os.PathLike[str],
    *,
    max_events: int = MAX_EVENTS,
    clock: Clock = time.perf_counter_ns,
) -> Iterator[Trace]:
    """Records what all threads of this worker do within the block, also if it fails.

    At the end, the worker writes `folder/worker-RANK.jsonl`. All workers can use the same folder.

    Args:
        folder: Where to write the file. It is created if it does not exist.
        max_events: How many events to keep per thread. The oldest are dropped, and counted.
        clock: A function that returns the time in nanoseconds. Other workers may use another clock.

    Yields:
        The trace. Read it after the block.

    Raises:
        UnsupportedError: If `max_events` is less than 1.
        TraceError: If the folder cannot be made.
    """
    check_int("max_events", max_events, least=1)
    check_callable("clock", clock)
    trace = Trace(folder)
    # Now, because failing after the training would be too late.
    try:
        trace.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TraceError(
            f"The folder for the trace cannot be made: {error}. Name another one."
        ) from error
    recorder = Recorder(clock, max_events)
    spans.start(recorder)
    try:
        yield trace
    finally:
        spans.stop()
        recorder.write(trace.folder, spans.place())


@computed_once
def record_if_asked() -> None:
    """Records the whole program into the folder that UNISONO_TRACE names, if it is set."""
    if not (name := os.environ.get("UNISONO_TRACE")):
        return
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(time.perf_counter_ns, MAX_EVENTS)
    spans.start(recorder)
    process = os.getpid()

    def end() -> None:
        spans.stop()
        # Launchers and forked children do not record.
        if recorder.lanes and os.getpid() == process:
            recorder.write(folder, spans.place())

    atexit.register(end)
