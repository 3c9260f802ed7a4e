"""`unisono.function` where nothing is captured: the step itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import unisono as uo
from unisono.errors import UnsupportedError
from unit.functions.programs import PROGRAMS, outcome


def double(x: float) -> float:
    """Doubles."""
    return 2 * x


def test_a_function_can_be_called_and_keeps_its_name() -> None:
    marked = uo.function(double)
    assert marked(3.0) == 6.0
    assert (vars(marked)["__name__"], marked.__doc__) == ("double", "Doubles.")
    assert repr(marked) == "function(double)"
    assert uo.function(marked).fn is double


def test_it_is_a_decorator_with_and_without_arguments() -> None:
    @uo.function
    def one(x: float) -> float:
        return x

    @uo.function(strict=True)
    def other(x: float) -> float:
        return x

    assert (one(1.0), one.strict) == (1.0, False)
    assert (other(1.0), other.strict) == (1.0, True)


@pytest.mark.parametrize("wrong", [3, "step", None])
def test_only_what_can_be_called_is_a_function(wrong: Any) -> None:
    with pytest.raises(UnsupportedError):
        uo.function(strict=True)(wrong)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize(
    "name", sorted(PROGRAMS.keys() - {"a scaler", "Adam, capturable", "two optimizers"})
)
def test_on_cpus_it_is_the_eager_step(name: str, num_replicas: int) -> None:
    devices = [f"/cpu:{i}" for i in range(num_replicas)]
    found = []
    for mark in (lambda step: step, uo.function(strict=True)):
        strategy = uo.MirroredStrategy(devices)
        found.append(outcome(PROGRAMS[name], strategy, mark, num_steps=2))
        strategy.close()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
