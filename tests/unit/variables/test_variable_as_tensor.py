"""A variable where torch, NumPy and Python take a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from unisono.errors import UnsupportedError
from unisono.strategies import MirroredStrategy
from unisono.variables.variable import Variable
from unit.variables.made import FIRST, MEAN, made, numbers


def test_torch_functions_take_variables() -> None:
    weight: Any = Variable([[1.0, 2.0]])

    assert functional.linear(torch.tensor([3.0, 4.0]), weight).tolist() == [11]
    assert torch.stack([weight, weight]).shape == (2, 1, 2)
    assert weight.sum().item() == 3
    assert torch.ones(1, 2).add_(weight).tolist() == [[2, 3]]
    assert (len(weight), weight[0, 1].item(), [r.tolist() for r in weight]) == (1, 2, [[1, 2]])


@pytest.mark.parametrize(
    ("ours", "plain"),
    [
        (lambda v: v + 1, 4), (lambda v: 1 + v, 4), (lambda v: v - 1, 2), (lambda v: 1 - v, -2),
        (lambda v: v * 2, 6), (lambda v: 2 * v, 6), (lambda v: v / 2, 1.5), (lambda v: 6 / v, 2),
        (lambda v: v // 2, 1), (lambda v: 7 // v, 2), (lambda v: v % 2, 1), (lambda v: 7 % v, 1),
        (lambda v: v**2, 9), (lambda v: 2**v, 8), (lambda v: -v, -3), (lambda v: abs(-v), 3),
        (lambda v: v > 2, True), (lambda v: v <= 2, False), (lambda v: v == 3, True),
        (lambda v: v != 3, False), (lambda v: torch.tensor(2.0) - v, -1), (lambda v: v - v, 0),
    ],
)  # fmt: skip
def test_operators(ours: Callable[[Variable], torch.Tensor], plain: float) -> None:
    assert ours(Variable(3.0)).item() == plain


def test_python_numbers_and_arrays_can_be_made_of_it(pair: MirroredStrategy) -> None:
    variable = made(pair, 3, FIRST)

    assert (int(variable), float(variable), bool(variable), [0, 1, 2, 9][variable]) == (3, 3, 1, 9)
    assert np.asarray(variable).tolist() == 3
    assert (np.ones(2) * made(pair, [2.0, 3.0], FIRST)).tolist() == [2, 3]
    assert torch.utils.dlpack.from_dlpack(made(pair, [2.0, 3.0], FIRST)).tolist() == [2, 3]
    assert hash(variable) == hash(variable)


def test_nothing_but_its_methods_changes_a_variable(pair: MirroredStrategy) -> None:
    variable = made(pair, [1.0], MEAN)
    refused: list[Callable[[], Any]] = [
        lambda: variable.__iadd__(1),
        lambda: torch.add(torch.ones(1), 1, out=variable),  # type: ignore[call-overload]
        lambda: torch.relu_(variable),  # type: ignore[arg-type]
        lambda: torch.nn.init.normal_(variable),  # type: ignore[arg-type]
        lambda: variable.add_(1),
        lambda: setattr(variable, "grad", None),
    ]

    for call in refused:
        with pytest.raises((UnsupportedError, AttributeError)):
            call()
    assert numbers(variable) == [[1], [1]]
