"""Constants that were put in come out again."""

from __future__ import annotations

import numpy as np
import pytest

from unisono.costs import Cluster, Link
from unisono.costs.model import OVERHEAD_SHARE
from unisono.errors import TuningError
from unisono_tools.pricing import phases_of, seconds_of
from unisono_tools.tuning.fitting import Sample, fit_link, fit_memory, least_sum_rate

LINK = Link(8e-6, 3e9, 1e-6)
RATE = 2e10
SIZES = [4**power for power in range(3, 13)]


def samples(num_ranks: int, noise: float = 0.0) -> list[Sample]:
    random = np.random.default_rng(0)
    cluster = Cluster(1, num_ranks, LINK, LINK, RATE)
    phases = phases_of("exchange", 1, num_ranks)
    return [
        Sample(phases, size, seconds_of(phases, cluster, size) * (1 + noise * random.normal()))
        for size in SIZES
    ]


def test_the_constants_of_exact_times_are_found() -> None:
    found = fit_link(samples(2) + samples(5), RATE)

    assert vars(found) == pytest.approx(vars(LINK))


def test_noise_of_five_percent_costs_about_five_percent() -> None:
    found = fit_link(samples(2, 0.05) + samples(5, 0.05), RATE)

    assert found.latency == pytest.approx(LINK.latency, rel=0.1)
    assert found.bandwidth == pytest.approx(LINK.bandwidth, rel=0.1)


def test_of_pairs_alone_the_overhead_is_a_share_of_the_latency() -> None:
    found = fit_link(samples(2), RATE)

    assert found.latency == pytest.approx(LINK.latency)
    assert found.overhead == pytest.approx(OVERHEAD_SHARE * LINK.latency)


def test_sums_had_at_least_the_rate_with_which_they_take_half_the_time() -> None:
    # 1.5 bytes are touched for each that is carried; both together take 1 / 3e9 + 1.5 / 2e10 s.
    least = least_sum_rate(samples(2))

    assert least == pytest.approx(1.5 / (0.5 * (1 / 3e9 + 1.5 / 2e10)), rel=0.01)
    assert fit_link(samples(2), least).bandwidth == pytest.approx(least / 1.5, rel=0.01)


def test_the_memory_rate_is_found() -> None:
    found = fit_memory([(size, 2e-6 + size / 1e10) for size in SIZES])

    assert (found.latency, found.bandwidth) == pytest.approx((2e-6, 1e10))


def test_times_that_do_not_grow_are_refused() -> None:
    with pytest.raises(TuningError, match="did not take longer"):
        fit_memory([(size, 1.0 / size) for size in SIZES])
