"""Reads the trace files of the workers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from unisono.arguments import in_words
from unisono.errors import TraceError
from unisono.tracing.recorder import FORMAT, check_folder

_NAME = re.compile(r"worker-(\d+)\.jsonl")


class Event(NamedTuple):
    """One span of one thread.

    Attributes:
        start: When it began, in nanoseconds.
        end: When it ended.
        category: What kind it is, such as "compute" or "collective".
        name: What was done.
        arguments: Further information.
    """

    start: int
    end: int
    category: str
    name: str
    arguments: dict[str, Any]

    @property
    def duration(self) -> int:
        """How long it took."""
        return self.end - self.start


class Thread(NamedTuple):
    """What one thread did.

    Attributes:
        name: The thread's name.
        events: By start; an outer event comes before those inside it.
    """

    name: str
    events: list[Event]


@dataclass(frozen=True)
class WorkerTrace:
    """What one worker has recorded.

    Attributes:
        rank: The rank of the worker.
        size: The number of workers.
        host: The name of its host.
        clock: The name of its clock. Workers with the same name read the same clock.
        num_dropped: How many old events were dropped.
        threads: What each thread did.
    """

    rank: int
    size: int
    host: str
    clock: str
    num_dropped: int
    threads: list[Thread]

    def events(self) -> Iterator[Event]:
        """All events, thread by thread."""
        for thread in self.threads:
            yield from thread.events


def read_folder(folder: str | os.PathLike[str]) -> list[WorkerTrace]:
    """Reads the files of all workers in `folder`, by rank, each on its own clock.

    Raises:
        TraceError: If there are no files, or they belong to different runs.
    """
    folder = check_folder(folder)
    try:
        found = sorted(path for path in folder.glob("*") if _NAME.fullmatch(path.name))
    except OSError as error:
        raise TraceError(
            f"The folder of the trace cannot be read: {error}. Name another one."
        ) from error
    if not found:
        raise TraceError(
            f"There is no trace in {folder}: it has no file worker-0.jsonl. Record one with "
            f"`unisono.tracing.record({str(folder)!r})` or with UNISONO_TRACE={folder}."
        )
    workers = sorted((_read(path) for path in found), key=lambda worker: worker.rank)
    sizes = sorted({worker.size for worker in workers})
    if len(sizes) > 1:
        raise TraceError(
            f"{folder} holds files of several runs, with {' and '.join(map(str, sizes))} workers. "
            "Record each run into its own folder."
        )
    return workers


def check_workers(workers: Any) -> None:
    """Raises unless these are the traces of at least one worker."""
    is_list = isinstance(workers, (list, tuple)) and len(workers) > 0
    if not is_list or not all(isinstance(one, WorkerTrace) for one in workers):
        raise TraceError(
            f"`workers` must be the list that `read_folder()` returns, got {in_words(workers)}."
        )


def _read(path: Path) -> WorkerTrace:
    with path.open() as file:
        try:
            header = json.loads(file.readline())
            known = header["format"] == FORMAT
            threads: list[list[Event]] = [[] for _ in header["threads"]]
            for line in file:
                number, *event = json.loads(line)
                threads[number].append(Event(*event))
        except (ValueError, LookupError, TypeError) as error:
            raise TraceError(
                f"{path} is not the trace of a worker: {error!r}. Remove it from the folder."
            ) from error
    if not known:
        raise TraceError(
            f"{path} has the format {header['format']!r}, but this version reads {FORMAT!r}. "
            "Record the run again."
        )
    return WorkerTrace(
        header["rank"],
        header["size"],
        header["host"],
        header["clock"],
        header["num_dropped"],
        [
            Thread(name, sorted(events, key=lambda event: (event.start, -event.end)))
            for name, events in zip(header["threads"], threads, strict=True)
        ],
    )
