"""Writes the file of one worker: a line that says whose it is, then one line per event."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from unisono.arguments import check_instance
from unisono.errors import TraceError
from unisono.system import boot_id, namespace
from unisono.tracing.recorder import Clock, Lane
from unisono.tracing.spans import Place

FORMAT = "unisono trace 1"


def write(folder: Path, place: Place, clock: Clock, lanes: Iterable[Lane]) -> Path:
    """Writes the file of this worker atomically, and returns its path."""
    lanes = list(lanes)
    # First, because a thread may still end a span and add an event.
    counts = [lane.count for lane in lanes]
    kept = [list(lane.events()) for lane in lanes]
    header = {
        "format": FORMAT,
        "rank": place.rank,
        "size": place.size,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "clock": _clock_name(clock),
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
    return path


def check_folder(folder: Any) -> Path:
    """Returns the path of a folder."""
    wanted = "the path of a folder"
    check_instance("folder", folder, (str, os.PathLike), wanted)
    path = Path(folder)
    if "\0" in str(path):
        raise TraceError(f"A path cannot have a NUL character, got {path!r}. Remove it.")
    return path


def _clock_name(clock: Clock) -> str:
    """Returns a name for a clock, the same in all processes that read the same clock."""
    boot, offset = boot_id(), namespace("time")
    if clock is time.perf_counter_ns and boot and offset:
        return f"{boot} {offset}"
    return f"of process {os.getpid()} on {socket.gethostname()}"
