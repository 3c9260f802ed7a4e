"""The short forms in which SLURM writes lists of hosts and of counts."""

from __future__ import annotations

import re

from unisono.errors import ClusterError

# A comma that is not inside brackets.
_COMMA = re.compile(r",(?![^\[]*\])")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_hosts(text: str) -> list[str]:
    """Returns the hosts of `node[01-03,7],login`: node01, node02, node03, node7, login."""
    hosts = [host for part in _COMMA.split(text.strip()) for host in _expand(part, text)]
    if not all(hosts):
        raise _unreadable_hosts(text)
    return hosts


def expand_counts(text: str) -> list[int]:
    """Returns the counts of `2(x3),1`: 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ClusterError(
                f"Cannot read {part!r} in the tasks per node {text!r}. Write them as SLURM does, "
                "for example '2(x3),1'."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand(part: str, text: str) -> list[str]:
    """Expands the first pair of brackets, and then those that follow it."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        if "]" in part:
            raise _unreadable_hosts(text)
        return [part]
    inside, bracket, after = rest.partition("]")
    if not bracket:
        raise _unreadable_hosts(text)
    numbers = [number for piece in inside.split(",") for number in _numbers(piece, text)]
    return [before + number + end for number in numbers for end in _expand(after, text)]


def _numbers(piece: str, text: str) -> list[str]:
    match = _RANGE.fullmatch(piece)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise _unreadable_hosts(text)
    first, last = match[1], match[2] or match[1]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _unreadable_hosts(text: str) -> ClusterError:
    return ClusterError(
        f"Cannot read the list of hosts {text!r}. Write it as SLURM does, for example "
        "'node[01-03,7],login'."
    )
