"""Ports that nobody takes before a test listens at them."""

from __future__ import annotations

import itertools
import random
import socket
import threading
from collections.abc import Iterator

# Below those that the kernel gives to connections.
_BLOCKS = [range(first, first + 1000) for first in range(10_000, 32_000, 1000)]


def _candidates() -> Iterator[int]:
    """The ports of a block that no other process with tests on this host uses."""
    for block in random.SystemRandom().sample(_BLOCKS, len(_BLOCKS)):
        with socket.socket() as guard:
            try:
                guard.bind(("", block[0]))
            except OSError:
                continue
            # The guard is kept as long as this process lives.
            yield from itertools.cycle(block[1:])
    raise AssertionError("tests in other processes use all blocks of ports")


_lock = threading.Lock()
_own = _candidates()


def free_ports(count: int) -> list[int]:
    """Returns different ports that nobody listens at."""
    # Tests ask from several threads, and a generator serves one at a time.
    with _lock:
        return list(itertools.islice(filter(_is_free, _own), count))


def free_port() -> int:
    """Returns one of them."""
    return free_ports(1)[0]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
