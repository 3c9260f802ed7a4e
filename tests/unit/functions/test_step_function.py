"""`unisono.function` marks a step."""

from __future__ import annotations

from typing import Any

import pytest

import unisono as uo
from unisono.errors import UnsupportedError


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
