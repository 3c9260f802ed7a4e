"""One rank's side of an all-reduce benchmark. Knows neither torch nor MPI.

A rank holds several competitors, and a command says which one is next. In a turn all ranks fill
their float32 data with fresh numbers, meet, read the clock, reduce the same data some times, read
the clock again and check every element.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]

# A prime, so that no two parts of an all-reduce hold the same numbers.
_PATTERN_LENGTH = 65_521


@dataclass(frozen=True)
class Competitor:
    """One way to reduce.

    Attributes:
        call: Reduces `data` in place.
        data: What this rank brings.
        factor: By which the pattern is multiplied after that many calls.
        cores: Where the calling thread runs meanwhile; as before if empty.
    """

    call: Callable[[], object]
    data: Floats
    factor: Callable[[int], float]
    cores: frozenset[int] = frozenset()


def sum_factor(size: int) -> Callable[[int], float]:
    """The factor of a sum over ranks that bring once, twice, ... the pattern, and then the sum."""
    return lambda calls: size * (size + 1) / 2 * float(size) ** (calls - 1)


def mean_factor(size: int) -> Callable[[int], float]:
    """The factor of a mean, which stays what it is."""
    return lambda calls: (size + 1) / 2


def serve(
    pipe: Connection,
    rank: int,
    prepare: Callable[[int], dict[str, Competitor]],
    meet: Callable[[], object],
) -> None:
    """Answers commands until the end.

        ("prepare", num_bytes)         the names of the competitors
        ("turn", name, seed, calls)    the system's clock before and after the calls

    An exception is an answer too.
    """
    competitors: dict[str, Competitor] = {}
    while True:
        command, *arguments = pipe.recv()
        if command == "end":
            return
        answer: Any
        try:
            if command == "prepare":
                competitors = prepare(*arguments)
                answer = list(competitors)
            else:
                name, seed, calls = arguments
                answer = take_turn(competitors[name], rank, meet, seed, calls)
        except Exception:
            answer = RuntimeError(traceback.format_exc())
        pipe.send(answer)


def take_turn(
    competitor: Competitor, rank: int, meet: Callable[[], object], seed: int, calls: int
) -> tuple[float, float]:
    """Reduces twice, of which only the second time counts; returns when it began and ended."""
    if competitor.cores:
        os.sched_setaffinity(0, competitor.cores)
    for attempt in range(2):
        pattern = np.random.default_rng([seed, attempt]).integers(1, 128, _PATTERN_LENGTH)
        _fill(competitor.data, pattern.astype(np.float32) * np.float32(rank + 1))
        meet()
        start = time.monotonic()
        for _ in range(calls):
            competitor.call()
        end = time.monotonic()
        _check(competitor.data, (pattern * competitor.factor(calls)).astype(np.float32))
    return start, end


def _fill(data: Floats, pattern: Floats) -> None:
    for part, numbers in _tiles(data, pattern):
        part[:] = numbers


def _check(data: Floats, expected: Floats) -> None:
    for part, numbers in _tiles(data, expected):
        # Powers of two times small integers are exact; other numbers of ranks are not.
        if not np.array_equal(part, numbers) and not np.allclose(part, numbers, rtol=1e-5):
            raise RuntimeError(
                f"A result is {part[:4]}..., and should be {numbers[:4]}... Please report this."
            )


def _tiles(data: Floats, pattern: Floats) -> Iterator[tuple[Floats, Floats]]:
    for start in range(0, len(data), len(pattern)):
        part = data[start : start + len(pattern)]
        yield part, pattern[: len(part)]
