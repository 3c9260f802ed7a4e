"""Writes to some rows of a variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from unisono.errors import UnsupportedError
from unisono.options import VariableAggregation
from unisono.strategies import MirroredStrategy
from unisono.variables.variable import Variable
from unit.variables.made import FIRST, MEAN, NONE, ON_READ, SUM, made, numbers, replica_id


def scattered(variable: Variable, name: str, *, rows: Callable[[], list[int]]) -> None:
    getattr(variable, name)(rows(), torch.tensor([replica_id() + 2.0]))


SCATTER_CASES = [
    ("scatter_add", NONE, [[6, 4, 4], [4, 7, 4]]),
    ("scatter_add", SUM, [[6, 7, 4]] * 2),
    ("scatter_add", MEAN, [[5, 5.5, 4]] * 2),
    ("scatter_add", FIRST, [[6, 4, 4]] * 2),
    ("scatter_sub", NONE, [[2, 4, 4], [4, 1, 4]]),
    ("scatter_sub", SUM, [[2, 1, 4]] * 2),
    ("scatter_sub", MEAN, [[3, 2.5, 4]] * 2),
    ("scatter_sub", FIRST, [[2, 4, 4]] * 2),
    ("scatter_mul", NONE, [[8, 4, 4], [4, 12, 4]]),
    ("scatter_mul", SUM, [[8, 12, 4]] * 2),
    ("scatter_mul", MEAN, [[4, 6, 4]] * 2),
    ("scatter_mul", FIRST, [[8, 4, 4]] * 2),
    ("scatter_div", SUM, [[2, 4 / 3, 4]] * 2),
    ("scatter_div", MEAN, [[4, 4 / 1.5, 4]] * 2),
    ("scatter_min", NONE, [[2, 4, 4], [4, 3, 4]]),
    ("scatter_min", FIRST, [[2, 4, 4]] * 2),
    ("scatter_max", FIRST, [[4, 4, 4]] * 2),
    ("scatter_update", NONE, [[2, 4, 4], [4, 3, 4]]),
    ("scatter_update", FIRST, [[2, 4, 4]] * 2),
]


@pytest.mark.parametrize(("name", "aggregation", "expected"), SCATTER_CASES)
def test_scatter_on_replicas(
    pair: MirroredStrategy, name: str, aggregation: VariableAggregation, expected: Any
) -> None:
    variable = made(pair, [4.0, 4.0, 4.0], aggregation)

    for _ in range(2):
        variable.assign([4.0, 4.0, 4.0])
        pair.run(lambda: scattered(variable, name, rows=lambda: [replica_id()]))
        torch.testing.assert_close(torch.tensor(numbers(variable)), torch.tensor(expected).float())


@pytest.mark.parametrize(
    ("name", "aggregation", "expected"),
    [
        ("scatter_add", SUM, 9),
        ("scatter_add", MEAN, 6.5),
        ("scatter_mul", SUM, 24),
        ("scatter_mul", MEAN, 10),
    ],
)
def test_replicas_may_scatter_to_one_row(
    pair: MirroredStrategy, name: str, aggregation: VariableAggregation, expected: float
) -> None:
    variable = made(pair, [4.0, 4.0], aggregation)

    pair.run(lambda: scattered(variable, name, rows=lambda: [1]))

    assert numbers(variable) == [[4, expected]] * 2


@pytest.mark.parametrize("name", ["scatter_min", "scatter_max", "scatter_update"])
@pytest.mark.parametrize("aggregation", [SUM, MEAN])
def test_rows_that_cannot_be_added_are_refused(
    pair: MirroredStrategy, name: str, aggregation: VariableAggregation
) -> None:
    variable = made(pair, [4.0, 4.0], aggregation)

    with pytest.raises(NotImplementedError, match=name):
        pair.run(lambda: scattered(variable, name, rows=lambda: [1]))
    with pytest.raises(NotImplementedError, match=name):
        getattr(variable, name)([0], [1.0])


@pytest.mark.parametrize("name", sorted({case[0] for case in SCATTER_CASES}))
def test_variables_that_are_read_together_take_no_scatter(
    pair: MirroredStrategy, name: str
) -> None:
    variable = made(pair, [4.0, 4.0], MEAN, ON_READ)

    with pytest.raises(NotImplementedError, match=f"`{name}.*ON_READ"):
        getattr(variable, name)([0], [1.0])


def test_scatter_for_all_replicas_with_rows_and_repeats(strategy: MirroredStrategy) -> None:
    table = made(strategy, torch.ones(3, 2), SUM)
    everywhere = strategy.num_replicas_in_sync

    table.scatter_add([2, 2], [[1.0, 2.0], [3.0, 4.0]])
    assert numbers(table) == [[[1, 1], [1, 1], [5, 7]]] * everywhere
    table.scatter_mul([[1, 1]], 3)
    assert numbers(table) == [[[1, 1], [9, 9], [5, 7]]] * everywhere
    table.scatter_div([1], [[9.0, 3.0]])
    assert numbers(table) == [[[1, 1], [1, 3], [5, 7]]] * everywhere
    table.scatter_sub([], torch.ones(0, 2))
    assert numbers(table) == [[[1, 1], [1, 3], [5, 7]]] * everywhere


@pytest.mark.parametrize(
    ("indices", "updates", "message"),
    [
        ([3], [1.0], "from 0 to 2"),
        ([-1], [1.0], "from 0 to 2"),
        ([0.5], [1.0], "must be integers"),
        ([0, 1], [1.0], r"shape \(2,\) here, got \(1,\)"),
    ],
)
def test_rows_that_are_not_there_are_refused(indices: Any, updates: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Variable([1.0, 2.0, 3.0]).scatter_add(indices, updates)


def test_integers_divide_towards_zero() -> None:
    variable = Variable([7, -7], aggregation=SUM)

    variable.scatter_div([0, 1], 2)

    assert numbers(variable) == [[3, -3]]
