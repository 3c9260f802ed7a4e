"""The cost of rounds of messages in a cluster.

A round ends when its busiest link is free. Inside a host, every rank has its own link. Each host
has one link to other hosts. Links send and receive at the same time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from unisono.algorithms.rounds import Round, Rounds, Send
from unisono.costs import Cluster, Line

Ranks: TypeAlias = npt.NDArray[np.int64]


class Phase(NamedTuple):
    """Rounds among some ranks of each host, or all.

    Attributes:
        stride: How far they are apart, counted over all hosts.
        groups: How many groups of such ranks a host takes part in at the same time.
        share: The part of the tensor that each group handles.
    """

    rounds: Rounds
    stride: int = 1
    groups: int = 1
    share: Fraction = Fraction(1)


class Load(NamedTuple):
    """What the busiest links carry in a round, as shares of the tensor, and how often.

    Attributes:
        inside_messages: Of the busiest rank, to or from others of its host.
        inside_share: What they carry.
        between_messages: Of the busiest rank, to or from other hosts.
        between_share: What all such messages of the busiest host carry.
        combined: What a rank reads and writes to add up.
        times: How many such rounds there are.
    """

    inside_messages: int
    inside_share: float
    between_messages: int
    between_share: float
    combined: float
    times: int


@functools.lru_cache(maxsize=256)
def loads_of(phases: tuple[Phase, ...], ranks_per_host: int) -> tuple[Load, ...]:
    """Returns what the links carry, round by round; it does not depend on what they cost."""
    return tuple(
        _load(one, phase, ranks_per_host) for phase in phases for one in phase.rounds.rounds
    )


def seconds_of(phases: tuple[Phase, ...], cluster: Cluster, num_bytes: float) -> float:
    """Returns how long `phases` take on a `cluster`, for `num_bytes` per rank."""
    return sum(
        load.times * _seconds(load, cluster, num_bytes)
        for load in loads_of(phases, cluster.ranks_per_host)
    )


def line_of(phases: tuple[Phase, ...], cluster: Cluster) -> Line:
    """Returns the cost of `phases` on a `cluster` as a line, from an empty tensor to a huge one."""
    return Line.through(functools.partial(seconds_of, phases, cluster))


def num_steps(phases: Sequence[Phase]) -> int:
    """Returns how many rounds follow each other."""
    return sum(one.times for phase in phases for one in phase.rounds.rounds)


def busiest_share(phases: tuple[Phase, ...], ranks_per_host: int, *, between: bool) -> float:
    """Returns what the busiest link inside a host, or between hosts, carries in all rounds."""
    loads = loads_of(phases, ranks_per_host)
    return sum(
        load.times * (load.between_share if between else load.inside_share) for load in loads
    )


def _seconds(load: Load, cluster: Cluster, num_bytes: float) -> float:
    inside = cluster.inside.seconds(load.inside_messages, load.inside_share * num_bytes)
    between = cluster.between.seconds(load.between_messages, load.between_share * num_bytes)
    return max(inside, between) + load.combined * num_bytes / cluster.memory_rate


def _load(one: Round, phase: Phase, ranks_per_host: int) -> Load:
    size = phase.rounds.num_ranks
    hosts = np.arange(size, dtype=np.int64) * phase.stride // ranks_per_host
    inside, between = _Traffic(size), _Traffic(size)
    for send in one.sends:
        sources, targets = _pairs(send, size, hosts)
        stays = hosts[sources] == hosts[targets]
        inside.add(sources[stays], targets[stays], send.share)
        between.add(sources[~stays], targets[~stays], send.share)
    share = float(phase.share)
    return Load(
        inside.most_messages,
        inside.most_bytes(np.arange(size)) * share,
        between.most_messages,
        between.most_bytes(hosts) * share * phase.groups,
        float(one.combined) * share,
        one.times,
    )


def _pairs(send: Send, size: int, hosts: Ranks) -> tuple[Ranks, Ranks]:
    """Returns who sends to whom, message by message."""
    senders = np.asarray(send.senders, dtype=np.int64)
    if len(senders) == size:
        senders = senders[hosts[senders] == 0]
    offsets = np.asarray(send.offsets, dtype=np.int64)
    sources = np.repeat(senders, len(offsets))
    return sources, (sources + np.tile(offsets, len(senders))) % size


class _Traffic:
    """Messages of one kind, counted at the sender and at the receiver."""

    def __init__(self, size: int) -> None:
        self._messages: tuple[npt.NDArray[Any], ...] = tuple(np.zeros((2, size)))
        self._bytes: tuple[npt.NDArray[Any], ...] = tuple(np.zeros((2, size)))

    def add(self, sources: Ranks, targets: Ranks, share: Fraction) -> None:
        for ends, messages, carried in zip(
            (sources, targets), self._messages, self._bytes, strict=True
        ):
            counts = np.bincount(ends, minlength=len(messages))
            messages += counts
            carried += counts * float(share)

    @property
    def most_messages(self) -> int:
        """The messages that the busiest rank sends, or receives."""
        return int(max(messages.max() for messages in self._messages))

    def most_bytes(self, links: Ranks) -> float:
        """What the busiest link carries one way, given the link of each rank."""
        return float(max(np.bincount(links, carried).max() for carried in self._bytes))
