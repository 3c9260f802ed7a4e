"""Links from measurements, and measurements from links."""

from __future__ import annotations

import pytest

from unisono.costs import Link
from unisono_tools.tuning import Measured, errors_between, fitted, predicted_seconds
from unisono_tools.tuning.fitting import never_less

LINKS = {
    "memory": Link(2e-6, 2e10, 0.0),
    "devices": Link(1e-6, 1e10, 0.0),
    "inside": Link(5e-6, 8e9, 1e-6),
    "loopback": Link(1e-4, 1e9, 2e-5),
    "between": Link(5e-5, 1e8, 1e-5),
}

SUM_RATE = LINKS["memory"].bandwidth


def exact() -> list[Measured]:
    """What a machine with these links, and no noise, would measure."""
    return [
        one._replace(seconds=predicted_seconds(one, LINKS[name], SUM_RATE))
        for name in LINKS
        for num_ranks in ((1,) if name in ("memory", "devices") else (2, 4))
        for one in (Measured(name, num_ranks, 4**power, 0.0) for power in range(4, 13))
    ]


def test_the_links_of_a_quiet_machine_are_found() -> None:
    found, sum_rate = fitted(exact())

    assert sum_rate == pytest.approx(SUM_RATE)

    assert {name: vars(link) for name, link in found.items()} == {
        name: pytest.approx(vars(link)) for name, link in LINKS.items()
    }


@pytest.mark.parametrize("factor", [0.2, 50])
@pytest.mark.parametrize("name", LINKS)
def test_one_measurement_that_was_disturbed_does_not_count_much(name: str, factor: float) -> None:
    rows = exact()
    index = next(i for i, one in enumerate(rows) if one.link == name and one.num_bytes == 4**8)
    rows[index] = rows[index]._replace(seconds=factor * rows[index].seconds)

    found = fitted(rows).links[name]

    assert LINKS[name].latency / 3 < found.latency < 3 * LINKS[name].latency
    assert LINKS[name].bandwidth / 3 < found.bandwidth < 3 * LINKS[name].bandwidth


def test_the_model_is_checked_at_sizes_that_were_not_fitted() -> None:
    rows = exact()
    assert errors_between(rows) == pytest.approx(dict.fromkeys(LINKS, 0.0), abs=1e-9)

    sizes = sorted({one.num_bytes for one in rows})
    doubled = [
        one._replace(seconds=2 * one.seconds) if one.num_bytes in sizes[1::2] else one
        for one in rows
    ]
    assert errors_between(doubled) == pytest.approx(dict.fromkeys(LINKS, 0.5))


def test_times_that_contradict_each_other_become_their_median() -> None:
    assert never_less([1, 2, 3]) == [1, 2, 3]
    assert never_less([1, 8, 2, 100]) == [1, 5, 5, 100]
    assert never_less([8, 4, 2]) == [4, 4, 4]
    assert never_less([]) == []
