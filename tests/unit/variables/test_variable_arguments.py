"""What may be written to a variable, and what a write returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unisono.errors import UnequalCallsError, UnsupportedError
from unisono.options import VariableAggregation
from unisono.strategies import MirroredStrategy
from unisono.values import Mirrored, PerReplica
from unisono.variables import Variable, VariableSynchronization
from unit.variables.made import (
    FIRST,
    MEAN,
    NONE,
    ON_READ,
    SUM,
    each_synchronization,
    made,
    number,
    numbers,
    replica_id,
    replicas,
)


@each_synchronization
def test_per_replica_values_are_refused_outside_replicas(
    pair: MirroredStrategy, synchronization: VariableSynchronization
) -> None:
    variable = made(pair, 1.0, SUM, synchronization)

    with pytest.raises(UnsupportedError, match=r"one value for all replicas .*got a PerReplica"):
        variable.assign(PerReplica([torch.tensor(2.0), torch.tensor(3.0)]))
    assert numbers(variable) == [1, 1]


def test_mirrored_values_and_variables_can_be_assigned(pair: MirroredStrategy) -> None:
    variable, other = made(pair, 1.0, MEAN), made(pair, 1.0, SUM, ON_READ)

    variable.assign(Mirrored([torch.tensor(3.0), torch.tensor(3.0)]))
    assert numbers(variable) == [3, 3]
    variable.assign(other)
    assert numbers(variable) == [2, 2]
    pair.run(lambda: variable.assign_add(other))
    assert numbers(variable) == [3, 3]


def test_a_replica_takes_its_own_component_of_what_it_is_given(pair: MirroredStrategy) -> None:
    variable = made(pair, 0.0, SUM)
    value = PerReplica([torch.tensor(1.0), torch.tensor(10.0)])

    pair.run(lambda: variable.assign(value))

    assert numbers(variable) == [11, 11]


def test_a_variable_can_be_assigned_a_view_of_itself(pair: MirroredStrategy) -> None:
    for aggregation in VariableAggregation:
        variable = made(pair, [[1.0, 2.0], [3.0, 4.0]], aggregation)

        variable.assign(variable.value().t())
        assert numbers(variable) == [[[1, 3], [2, 4]]] * 2
        variable.assign_add(variable.value())
        assert numbers(variable) == [[[2, 6], [4, 8]]] * 2


def test_assign_returns_what_was_written(pair: MirroredStrategy) -> None:
    mean, alone = made(pair, 1.0, MEAN), made(pair, 1.0, NONE)

    everywhere = mean.assign(6.0)
    assert isinstance(everywhere, Mirrored)
    assert numbers(everywhere) == [6, 6]
    assert [one.tolist() for one in pair.run(lambda: mean.assign(number())).values] == [1.5, 1.5]
    assert [one.tolist() for one in pair.run(lambda: alone.assign(number())).values] == [1, 2]
    assert mean.assign(1.0, read_value=False) is None
    assert pair.run(lambda: mean.assign(number(), read_value=False)) is None


def test_values_of_another_shape_or_a_lossy_dtype_are_refused(pair: MirroredStrategy) -> None:
    vector, count = made(pair, [1.0, 2.0], MEAN), made(pair, 1, FIRST)

    with pytest.raises(UnsupportedError, match=r"shape \(2,\) here, got \(\)"):
        vector.assign(1.0)
    with pytest.raises(UnsupportedError, match=r"cannot hold torch\.float32 without loss"):
        pair.run(lambda: count.assign(1.5))
    assert (numbers(vector), numbers(count)) == ([[1, 2]] * 2, [1, 1])


def test_replicas_that_write_different_variables_are_told(pair: MirroredStrategy) -> None:
    a, b = made(pair, 1.0, MEAN, name="a"), made(pair, 1.0, MEAN, name="b")

    with pytest.raises(UnequalCallsError, match="write different variables"):
        pair.run(lambda: (a, b)[replica_id()].assign(number()))
    with pytest.raises(UnequalCallsError, match="write different variables"):
        pair.run(lambda: (a.assign, a.assign_add)[replica_id()](number()))
    pair.run(lambda: a.assign(number()))
    assert (numbers(a), numbers(b)) == ([1.5, 1.5], [1, 1])


def test_replicas_that_run_one_by_one_write_the_same() -> None:
    with replicas(3, serial=True) as strategy:
        variable = made(strategy, 1.0, SUM)

        for _ in range(2):
            strategy.run(lambda: variable.assign_add(number()))

        assert numbers(variable) == [13] * 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("validate_shape", False),
        ("caching_device", "cpu:0"),
        ("variable_def", object()),
        ("import_scope", "scope"),
        ("constraint", torch.relu),
    ],
)
def test_what_a_variable_cannot_do_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"`{name}` of a `Variable` must be"):
        Variable(1.0, **{name: value})


def test_arguments_come_in_the_order_of_tensorflow() -> None:
    variable = Variable(
        1, False, True, None, "counter", None, torch.int64, None, None,
        VariableSynchronization.ON_READ, VariableAggregation.SUM, (),
    )  # fmt: skip

    assert (variable.name, variable.dtype, variable.is_on_read) == ("counter", torch.int64, True)


def test_a_shape_is_that_of_the_value() -> None:
    assert Variable(torch.ones(2, 3), shape=[2, 3]).shape == (2, 3)
    for wrong in [(3, 2), (None, 3), ()]:
        with pytest.raises(UnsupportedError, match=r"of shape \(2, 3\), but `shape` is"):
            Variable(torch.ones(2, 3), shape=wrong)  # type: ignore[arg-type]
