"""Measured times, the links fitted to them, and their predictions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from unisono.costs import USUAL_LINK, fastest_flat
from unisono.costs.model import Cluster, Link
from unisono.costs.tuning import Run
from unisono_tools.pricing import Phase, phases_of, seconds_of
from unisono_tools.tuning.fitting import Sample, fit_link, fit_memory, least_sum_rate, never_less

# A sum of two replicas in place reads and writes each of them.
_TOUCHED = 4


class Measured(NamedTuple):
    """One size on one link.

    Attributes:
        link: The name of the link; see `Tuning`.
        num_ranks: How many ranks took part.
        num_bytes: The size of one rank's tensor.
        seconds: The median time.
        num_hosts: How many hosts the ranks of a whole cluster were on; 1 if one link was measured.
    """

    link: str
    num_ranks: int
    num_bytes: int
    seconds: float
    num_hosts: int = 1


class Fitted(NamedTuple):
    """The constants that explain measurements.

    Attributes:
        links: The links, by name.
        sum_rate: The bytes per second that a rank reads and writes in a sum.
    """

    links: dict[str, Link]
    sum_rate: float


def fitted(measured: Iterable[Measured]) -> Fitted:
    """Returns the constants that explain what was measured."""
    by_group: dict[tuple[str, int], list[Measured]] = {}
    for one in measured:
        if one.num_hosts == 1:
            by_group.setdefault((one.link, one.num_ranks), []).append(one)
    by_link: dict[str, list[Measured]] = {}
    for (name, _), rows in by_group.items():
        by_link.setdefault(name, []).extend(_smoothed(rows))
    sums, copies = by_link.pop("memory"), by_link.pop("devices")
    links = {
        "memory": fit_memory([(_TOUCHED * one.num_bytes, one.seconds) for one in sums]),
        "devices": fit_memory([(one.num_bytes, one.seconds) for one in copies]),
    }
    samples = {
        name: [Sample(_phases(one), one.num_bytes, one.seconds) for one in rows]
        for name, rows in by_link.items()
    }
    sum_rate = max([links["memory"].bandwidth, *map(least_sum_rate, samples.values())])
    links |= {name: fit_link(rows, sum_rate) for name, rows in samples.items()}
    return Fitted(links, sum_rate)


def runs_of(measured: Iterable[Measured]) -> tuple[Run, ...]:
    """Returns the all-reduces between all ranks of a cluster that are among the measurements."""
    by_shape: dict[tuple[int, int], dict[int, float]] = {}
    for one in measured:
        # Through shared memory, that is all that Unisono runs on one host.
        if one.link == "inside" or one.num_hosts > 1:
            shape = one.num_hosts, one.num_ranks // one.num_hosts
            by_shape.setdefault(shape, {})[one.num_bytes] = one.seconds
    return tuple(Run(*shape, tuple(sorted(times.items()))) for shape, times in by_shape.items())


def _smoothed(rows: Sequence[Measured]) -> list[Measured]:
    in_order = sorted(rows, key=lambda one: one.num_bytes)
    seconds = never_less([one.seconds for one in in_order])
    return [one._replace(seconds=s) for one, s in zip(in_order, seconds, strict=True)]


def errors_between(measured: Sequence[Measured]) -> dict[str, float]:
    """Returns the median relative error of the model for each link.

    The links are fitted to every other size, and compared at the sizes in between.
    """
    sizes = sorted({one.num_bytes for one in measured})
    links, sum_rate = fitted(one for one in measured if one.num_bytes in sizes[::2])
    errors: dict[str, list[float]] = {}
    for one in measured:
        if one.num_bytes in sizes[1::2] and one.num_hosts == 1:
            predicted = predicted_seconds(one, links[one.link], sum_rate)
            errors.setdefault(one.link, []).append(abs(predicted / one.seconds - 1))
    return {name: median(own) for name, own in errors.items()}


def predicted_seconds(one: Measured, link: Link, sum_rate: float) -> float:
    """Returns how long what was measured takes by the model."""
    if one.link == "memory":
        return link.seconds(1, _TOUCHED * one.num_bytes)
    if one.link == "devices":
        return link.seconds(1, one.num_bytes)
    cluster = Cluster(1, one.num_ranks, link, link, sum_rate)
    return seconds_of(_phases(one), cluster, one.num_bytes)


def _phases(one: Measured) -> tuple[Phase, ...]:
    """Returns what the communicator over this link does with such a tensor."""
    if one.link == "inside":
        return phases_of("exchange", 1, one.num_ranks)
    # While measuring, ranks choose by the default constants.
    return phases_of(fastest_flat(one.num_ranks, one.num_bytes, USUAL_LINK), 1, one.num_ranks)
