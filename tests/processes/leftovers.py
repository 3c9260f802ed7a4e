"""What a process holds, and whether something is left of what has ended."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

# Connections and threads of libraries end a moment after the code that used them.
_PATIENCE_SECONDS = 15.0
# On a busy machine a single look may take as long, and what it frees may hold something else.
_LEAST_LOOKS = 5


class Holdings(NamedTuple):
    """How much of everything that can be left behind there is."""

    descriptors: int
    threads: int
    segments: int
    ports: int

    @classmethod
    def now(cls) -> Holdings:
        """Counts what this process holds."""
        maps = Path("/proc/self/maps").read_text().splitlines()
        return cls(
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            segments=sum("memfd:unisono" in line for line in maps),
            ports=len(_listening()),
        )

    def is_within(self, other: Holdings) -> bool:
        """Whether there is no more of anything."""
        return all(mine <= theirs for mine, theirs in zip(self, other, strict=True))


def _listening() -> set[str]:
    """The sockets of this process that listen, by inode."""
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    listening = {row[9] for row in rows if row[3] == "0A"}
    return {inode for inode in listening if inode in _own_sockets()}


def _own_sockets() -> set[str]:
    links = []
    for number in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:
            continue  # The one that lists them.
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def settled(limit: Holdings) -> Holdings:
    """Waits for what ends by itself, until no more than `limit` is held, and returns what is."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    now = Holdings.now()
    for number in itertools.count():
        if now.is_within(limit) or (time.monotonic() > deadline and number >= _LEAST_LOOKS):
            break
        time.sleep(0.02)
        # The frames of an error may hold what was used in them, in a circle.
        gc.collect()
        now = Holdings.now()
    return now


def extra_threads(before: int, *, but: str = "") -> int:
    """Waits for threads that end by themselves, and returns how many more than `before` are left.

    One with the name `but` may stay.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (extra := sum(one.name != but for one in threading.enumerate()) - before) > 0:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return extra
