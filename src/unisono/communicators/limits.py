"""What a process may still have: files, threads and memory. Told before ranks connect.

A rank that cannot open a socket in the middle would leave the others to wait for their timeout, and
Gloo ends a process that cannot accept a connection. So every rank says beforehand what it can have.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from unisono.communicators.choice import Carrier, Choice
from unisono.communicators.headers import ranks_in_words
from unisono.errors import CommunicationError

# Sockets, pipes and selectors that do not depend on the number of ranks.
_FILES = 16
_FILES_FOR_SHARED_MEMORY = 6
# The stacks of the threads of an engine and of the watch, and rooms for messages.
_ROOM_BYTES = 96 << 20


def own_limits(size: int) -> dict[str, Any]:
    """Returns what this process can have, as far as it needs it to connect `size` ranks."""
    return {"files": _files_left(_most_files(size)), "room": _has_room() and _has_thread()}


def check_limits(limits: Sequence[Mapping[str, Any]], choice: Choice) -> None:
    """Raises a `CommunicationError` that names the ranks that cannot have what it takes."""
    is_shared = choice.carrier is Carrier.SHARED_MEMORY
    needed = _FILES_FOR_SHARED_MEMORY if is_shared else _most_files(len(limits))
    if short := [rank for rank, one in enumerate(limits) if one["files"] < needed]:
        found = ", ".join(str(limits[rank]["files"]) for rank in short)
        raise CommunicationError(
            f"Connecting {len(limits)} ranks needs {needed} more open files, but "
            f"{ranks_in_words(short)} can have only {found}. Raise the limit there (`ulimit -n`).",
            short,
        )
    short = [rank for rank, one in enumerate(limits) if not one["room"]]
    if short and not is_shared:
        raise CommunicationError(
            f"Connecting {len(limits)} ranks needs threads and {_ROOM_BYTES >> 20} MiB of address "
            f"space, which {ranks_in_words(short)} cannot have. Raise the limits there "
            "(`ulimit -v`, `ulimit -u`).",
            short,
        )


def _most_files(size: int) -> int:
    return _FILES + 2 * size


def _files_left(most: int) -> int:
    """Returns how many files can be opened, or `most`."""
    opened: list[int] = []
    try:
        opened.append(os.open("/", os.O_RDONLY))
        while len(opened) < most:
            opened.append(os.dup(opened[0]))
    except OSError:
        pass
    finally:
        for one in opened:
            os.close(one)
    return len(opened)


def _has_room() -> bool:
    try:
        # Pages that nobody touches cost nothing.
        mmap.mmap(-1, _ROOM_BYTES, access=mmap.ACCESS_COPY).close()
    except OSError:
        return False
    return True


def _has_thread() -> bool:
    thread = threading.Thread(target=lambda: None, name="unisono limits", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return False
    thread.join()
    return True
