"""Times that were measured, the links that they make, and what these links predict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from unisono.costs.between_workers import STEP_BYTES, one_step_pays, phases_of
from unisono.costs.fitting import Sample, fit_link, fit_memory, never_less
from unisono.costs.links import Cluster, Link
from unisono.costs.rounds import Phase, seconds_of

# A sum of two replicas in place reads and writes each of them.
_TOUCHED = 4


class Measured(NamedTuple):
    """One size on one link.

    Attributes:
        link: The name of the link; see `Tuning`.
        num_ranks: How many ranks took part.
        num_bytes: The size of one rank's tensor.
        seconds: How long it took, the median of many.
    """

    link: str
    num_ranks: int
    num_bytes: int
    seconds: float


def fitted_links(measured: Iterable[Measured]) -> dict[str, Link]:
    """Returns the links that explain what was measured, by name."""
    by_group: dict[tuple[str, int], list[Measured]] = {}
    for one in measured:
        by_group.setdefault((one.link, one.num_ranks), []).append(one)
    by_link: dict[str, list[Measured]] = {}
    for (name, _), rows in by_group.items():
        by_link.setdefault(name, []).extend(_smoothed(rows))
    memory = fit_memory([(_TOUCHED * one.num_bytes, one.seconds) for one in by_link["memory"]])
    return {
        name: memory if name == "memory" else _fitted(name, rows, memory)
        for name, rows in by_link.items()
    }


def _smoothed(rows: Sequence[Measured]) -> list[Measured]:
    in_order = sorted(rows, key=lambda one: one.num_bytes)
    seconds = never_less([one.seconds for one in in_order])
    return [one._replace(seconds=s) for one, s in zip(in_order, seconds, strict=True)]


def predicted_seconds(one: Measured, link: Link, memory: Link) -> float:
    """Returns how long what was measured takes by the model."""
    if one.link == "memory":
        return memory.seconds(1, _TOUCHED * one.num_bytes)
    if one.link == "devices":
        return link.seconds(1, one.num_bytes)
    cluster = Cluster(1, one.num_ranks, link, link, memory.bandwidth)
    return seconds_of(_phases(one), cluster, one.num_bytes)


def _fitted(name: str, rows: Sequence[Measured], memory: Link) -> Link:
    if name == "devices":
        return fit_memory([(one.num_bytes, one.seconds) for one in rows])
    samples = [Sample(_phases(one), one.num_bytes, one.seconds) for one in rows]
    return fit_link(samples, memory.bandwidth)


def _phases(one: Measured) -> tuple[Phase, ...]:
    """Returns what the communicator over this link does with such a tensor."""
    through_gloo = one.link != "inside"
    is_one_step = through_gloo and one_step_pays(one.num_ranks, one.num_bytes, STEP_BYTES)
    return phases_of("one step" if is_one_step else "exchange", 1, one.num_ranks)
