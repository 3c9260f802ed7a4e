"""Constants from measured times: least squares that count errors in percent."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unisono.costs.model import Link
from unisono.errors import TuningError
from unisono_tools.pricing.rounds import Phase, loads_of

# Sums take at most this part of what a byte costs between ranks, however slow they were alone.
_MOST_FOR_SUMS = 0.5
# The error that is left halves with each.
_ITERATIONS = 40


class Sample(NamedTuple):
    """A measured reduction.

    Attributes:
        phases: Its phases, all on one kind of link.
        num_bytes: The size of one rank's tensor.
        seconds: The median time.
    """

    phases: tuple[Phase, ...]
    num_bytes: int
    seconds: float


def fit_link(samples: Sequence[Sample], sum_rate: float) -> Link:
    """Returns the link that explains the samples best, if ranks sum at `sum_rate`.

    A byte costs the link b, and the sum 1 / `sum_rate` for each byte that it reads or writes. The
    sum is counted as extra bytes on the link. Their number depends on b, so b is found by
    iteration.
    """
    per_byte = _fit(samples, 0.0).per_byte
    for _ in range(_ITERATIONS):
        fit = _fit(samples, 1 / (sum_rate * per_byte))
        per_byte = fit.per_byte
    have_further = any(own.further for own in map(_columns, samples))
    overhead = (fit.overhead,) if have_further else ()
    return Link(fit.latency, 1 / per_byte, *overhead)


def least_sum_rate(samples: Sequence[Sample]) -> float:
    """Returns the bytes per second that sums of these samples must at least have run at."""
    columns = [_columns(sample) for sample in samples]
    touched = sum(own.touched for own in columns) / sum(own.carried for own in columns)
    return touched / (_MOST_FOR_SUMS * _fit(samples, 0.0).per_byte)


class _Columns(NamedTuple):
    """How often a sample pays the latency and the overhead, and for how many bytes."""

    steps: int
    further: int
    carried: float
    touched: float


class _Fit(NamedTuple):
    latency: float
    overhead: float
    per_byte: float


def _columns(sample: Sample) -> _Columns:
    loads = loads_of(sample.phases, _ALL_ON_ONE_HOST)
    return _Columns(
        sum(load.times for load in loads),
        sum(load.times * (load.inside_messages - 1) for load in loads),
        sample.num_bytes * sum(load.times * load.inside_share for load in loads),
        sample.num_bytes * sum(load.times * load.combined for load in loads),
    )


def _fit(samples: Sequence[Sample], touched_as_carried: float) -> _Fit:
    columns = [_columns(sample) for sample in samples]
    found = fit_positive(
        [
            [own.steps for own in columns],
            [own.further for own in columns],
            [own.carried + touched_as_carried * own.touched for own in columns],
        ],
        [sample.seconds for sample in samples],
    )
    if found[-1] == 0:
        raise _too_noisy([(sample.num_bytes, sample.seconds) for sample in samples])
    return _Fit(*found)


def fit_memory(sizes: Sequence[tuple[int, float]]) -> Link:
    """Returns the latency and rate of sums, given bytes read and written with their seconds."""
    touched, seconds = zip(*sizes, strict=True)
    latency, per_byte = fit_positive([[1] * len(sizes), touched], seconds)
    if per_byte == 0:
        raise _too_noisy(sizes)
    return Link(latency, 1 / per_byte, overhead=0.0)


def fit_positive(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Returns factors of 0 or more with which the columns add up to the seconds, about.

    Errors count in percent, so a microsecond of the shortest weighs as much as a millisecond of
    the longest. A column that would get a negative factor is left out.
    """
    weights = 1 / np.asarray(seconds, dtype=np.float64)
    matrix: npt.NDArray[np.float64] = np.asarray(columns, dtype=np.float64).T * weights[:, None]
    used = [i for i in range(len(columns)) if matrix[:, i].any()]
    factors = np.zeros(len(columns))
    while used:
        # Columns differ by many powers of ten, which would cost digits.
        scales = np.linalg.norm(matrix[:, used], axis=0)
        found = np.linalg.lstsq(matrix[:, used] / scales, np.ones(len(weights)), rcond=None)[0]
        if found.min() >= 0:
            factors[used] = found / scales
            break
        used.pop(int(found.argmin()))
    return tuple(map(float, factors))


def never_less(seconds: Sequence[float]) -> list[float]:
    """Returns times by size such that none is less than one before it.

    A larger tensor cannot take less time. Times that contradict this were disturbed, and are
    replaced by their median.
    """
    groups: list[list[float]] = []
    for one in seconds:
        groups.append([one])
        while len(groups) > 1 and median(groups[-2]) > median(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    return [median(group) for group in groups for _ in group]


def _too_noisy(sizes: Sequence[tuple[int, float]]) -> TuningError:
    told = ", ".join(f"{1e6 * seconds:.3g} us for {num_bytes} B" for num_bytes, seconds in sizes)
    return TuningError(
        f"Larger messages did not take longer in the measurement of {len(sizes)} sizes: {told}. "
        "Measure again when the machine is less busy."
    )


_ALL_ON_ONE_HOST = 1 << 30
