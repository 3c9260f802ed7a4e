"""Numbered scenarios: what is asked of two replicas, and what TensorFlow 2.21 answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from on_replica import replica_id as rid
from torch import Tensor

import unisono as uo


class PR(NamedTuple):
    """A `PerReplica`, as plain numbers."""

    values: list[Any]


class M(NamedTuple):
    """A `Mirrored`, as plain numbers."""

    values: list[Any]


class Scenario(NamedTuple):
    """One scenario.

    Attributes:
        number: Its number.
        title: What is asked, in words.
        ask: Asks it of a strategy.
        answer: What comes of it: a value, or the class of an error.
        num_replicas: How many replicas there are.
    """

    number: int
    title: str
    ask: Callable[[Any], Any]
    answer: Any
    num_replicas: int = 2


def each(scenarios: list[Scenario]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "scenario", [pytest.param(one, id=f"{one.number} {one.title}") for one in scenarios]
    )


def check(scenario: Scenario, make: Callable[..., uo.MirroredStrategy]) -> None:
    """Asks twice, of two strategies: an answer must not depend on what was asked before."""
    for _ in range(2):
        strategy = make(scenario.num_replicas)
        if isinstance(scenario.answer, type) and issubclass(scenario.answer, Exception):
            with pytest.raises(scenario.answer):
                scenario.ask(strategy)
            assert strategy.run(lambda: 1) == 1
        else:
            assert shown(scenario.ask(strategy)) == scenario.answer


def shown(value: Any) -> Any:
    """Returns a nested value as plain numbers."""
    if isinstance(value, uo.Variable):
        return PR([shown(component) for component in value.values])
    if isinstance(value, uo.DistributedValues):
        kind = PR if isinstance(value, uo.PerReplica) else M
        return kind([shown(component) for component in value.values])
    if isinstance(value, Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return {key: shown(item) for key, item in value.items()}
    return type(value)(map(shown, value)) if type(value) in (list, tuple) else value


def per_replica(*values: Any) -> uo.PerReplica:
    return uo.PerReplica(torch.tensor(value) for value in values)


def x() -> Tensor:
    """What a replica gives in many scenarios: 1, 2."""
    return torch.tensor(rid() + 1.0)
