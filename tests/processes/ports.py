"""Ports that nobody takes before a test listens at them."""

from __future__ import annotations

import itertools
import os
import random
import socket

# Below those that the kernel gives to connections, and apart from those of other pytest workers.
_FIRST, _COUNT = 10_000, 2_000
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
_own = range(_FIRST + _COUNT * _worker, _FIRST + _COUNT * (_worker + 1))
# Another run of the tests on this host begins somewhere else.
_start = random.SystemRandom().randrange(_COUNT)
_candidates = itertools.cycle([*_own[_start:], *_own[:_start]])


def free_ports(count: int) -> list[int]:
    """Returns different ports that nobody listens at."""
    return list(itertools.islice(filter(_is_free, _candidates), count))


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
