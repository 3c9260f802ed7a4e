"""The constants of a plan: from the options, the tuning file, or a modern cluster."""

from __future__ import annotations

from typing import NamedTuple

from unisono.costs import Link, Run, Tuning

# A modern cluster: GPUs with fast links in a host, 400 Gbit/s between hosts.
_INSIDE = Link(5e-6, 200e9)
_BETWEEN = Link(15e-6, 50e9)
_MEMORY_RATE = 1e12


class Constants(NamedTuple):
    """The constants of a plan, and their sources.

    Attributes:
        inside: The link of a rank inside its host.
        between: The link of a host.
        memory_rate: Bytes per second that a sum reads and writes.
        sources: The source of each constant in words: a file, an option, an assumption.
        runs: What was measured over these links; nothing, if some are given or assumed.
    """

    inside: Link
    between: Link
    memory_rate: float
    sources: dict[str, str]
    runs: tuple[Run, ...] = ()


def constants_of(given: dict[str, float | None], tuning: Tuning | None) -> Constants:
    """Returns the constants, given the options of the command and what was measured."""
    sources: dict[str, str] = {}

    def constant(option: str, tuned: float | None, assumed: float) -> float:
        found = {"given": given[option], "tuned": tuned, "assumed": assumed}
        sources[option] = next(source for source, value in found.items() if value is not None)
        return float(found[sources[option]] or 0.0)

    def link(prefix: str, tuned: Link | None, assumed: Link) -> Link:
        constants = [
            constant(prefix + name, None if tuned is None else getattr(tuned, name), value)
            for name, value in (("latency", assumed.latency), ("bandwidth", assumed.bandwidth))
        ]
        if tuned is not None and sources[f"{prefix}latency"] == "tuned":
            constants.append(tuned.overhead)
        return Link(*constants)

    between = None
    if tuning is not None:
        between = tuning.tcp if tuning.is_tcp_faster else tuning.between
    constants = Constants(
        link("inside_", None if tuning is None else tuning.inside, _INSIDE),
        link("", between, _BETWEEN),
        constant("memory_rate", None if tuning is None else tuning.sum_rate, _MEMORY_RATE),
        sources,
    )
    if tuning is None:
        return constants
    assumed = {
        name.removesuffix("latency").removesuffix("bandwidth")
        for name, source in sources.items()
        if source != "tuned"
    }
    # Between hosts, all constants count. On one host, those of links between hosts do not.
    runs = (
        tuning.runs
        if not assumed
        else [run for run in tuning.runs if run.num_hosts == 1 and assumed == {""}]
    )
    return constants._replace(runs=tuple(runs))
