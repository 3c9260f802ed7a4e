"""`Variable` against the tables of tf.distribute, and where it is better."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from unisono.contexts import get_replica_context
from unisono.errors import ContextError, UnequalCallsError, UnsupportedError
from unisono.options import VariableAggregation
from unisono.strategies import MirroredStrategy
from unisono.testing import separate_memories
from unisono.values import DistributedValues, Mirrored, PerReplica
from unisono.variables.policy import VariablePolicy, VariableSynchronization
from unisono.variables.variable import Variable

NONE, SUM, MEAN = VariableAggregation.NONE, VariableAggregation.SUM, VariableAggregation.MEAN
FIRST = VariableAggregation.ONLY_FIRST_REPLICA
ON_WRITE, ON_READ = VariableSynchronization.ON_WRITE, VariableSynchronization.ON_READ

each_aggregation = pytest.mark.parametrize("aggregation", list(VariableAggregation))
each_synchronization = pytest.mark.parametrize("synchronization", [ON_WRITE, ON_READ])


@contextmanager
def replicas(num_replicas: int, *, serial: bool = False) -> Iterator[MirroredStrategy]:
    strategy = MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)], serial=serial)
    try:
        yield strategy
    finally:
        strategy.close()


@pytest.fixture(params=[1, 2, 3])
def strategy(request: pytest.FixtureRequest, memories: str) -> Iterator[MirroredStrategy]:
    with replicas(request.param) as made:
        yield made


@pytest.fixture
def pair(memories: str) -> Iterator[MirroredStrategy]:
    with replicas(2) as made:
        yield made


def made(
    strategy: MirroredStrategy,
    value: Any = 1.0,
    aggregation: VariableAggregation = NONE,
    synchronization: VariableSynchronization = VariableSynchronization.AUTO,
    **kwargs: Any,
) -> Variable:
    with strategy.scope():
        return Variable(value, synchronization=synchronization, aggregation=aggregation, **kwargs)


def replica_id() -> int:
    context = get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


def number() -> torch.Tensor:
    """What a replica writes: 1, 2, 3, ..."""
    return torch.tensor(replica_id() + 1.0)


def numbers(variable: DistributedValues) -> list[Any]:
    return [component.tolist() for component in variable.values]


def aggregated(aggregation: VariableAggregation, num_replicas: int) -> list[float]:
    given = [i + 1.0 for i in range(num_replicas)]
    if aggregation is NONE:
        return given
    one = {SUM: sum(given), MEAN: sum(given) / num_replicas, FIRST: given[0]}[aggregation]
    return [one] * num_replicas


# Making one


@pytest.mark.parametrize("synchronization", [VariableSynchronization.NONE, "on_read", None, 3])
def test_no_other_synchronization_is_taken(synchronization: Any) -> None:
    with pytest.raises(ValueError, match="`synchronization` must be one of"):
        Variable(1.0, synchronization=synchronization)


@pytest.mark.parametrize("aggregation", ["sum", None, 1])
def test_no_other_aggregation_is_taken(aggregation: Any) -> None:
    with pytest.raises(ValueError, match="`aggregation` must be one of"):
        Variable(1.0, aggregation=aggregation)


@each_synchronization
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integers_have_no_mean(
    dtype: torch.dtype, synchronization: VariableSynchronization
) -> None:
    with pytest.raises(ValueError, match="cannot hold the mean"):
        Variable(1, dtype=dtype, synchronization=synchronization, aggregation=MEAN)


def test_variables_are_trainable_unless_they_are_synchronized_on_read() -> None:
    assert Variable(1.0).trainable
    assert not Variable(1.0, synchronization=ON_READ).trainable
    assert Variable(1.0, synchronization=ON_READ, trainable=True).trainable
    assert not Variable(1.0, trainable=False).value().requires_grad


def test_a_policy_cannot_be_changed() -> None:
    policy = VariablePolicy(ON_READ, SUM, torch.int64)

    with pytest.raises(AttributeError):
        policy.trainable = True  # type: ignore[misc]


def test_an_initial_value_is_called_once(strategy: MirroredStrategy) -> None:
    calls: list[int] = []

    variable = made(strategy, lambda: calls.append(1) or torch.tensor(7.0))  # type: ignore[func-returns-value]

    assert calls == [1]
    assert numbers(variable) == [7.0] * strategy.num_replicas_in_sync
    assert variable.devices == strategy.extended.worker_devices


def test_a_variable_tells_what_it_is(pair: MirroredStrategy) -> None:
    variable = made(pair, [1, 2], SUM, dtype=torch.float64, name="total")

    assert (variable.name, variable.dtype, variable.shape) == ("total", torch.float64, (2,))
    assert (variable.aggregation, variable.synchronization) == (
        SUM,
        VariableSynchronization.AUTO,
    )
    assert made(pair, 0.1, dtype=torch.float64).numpy() == 0.1


def test_a_variable_does_not_change_what_it_was_made_from(pair: MirroredStrategy) -> None:
    source = torch.zeros(2)

    made(pair, source, FIRST).assign(torch.ones(2))

    assert source.tolist() == [0, 0]


def test_made_on_replicas_there_is_one_that_starts_from_replica_0(
    strategy: MirroredStrategy,
) -> None:
    kept: dict[str, Variable] = {}

    def step() -> Variable:
        if replica_id() not in seen:
            seen.add(replica_id())
            made_here = Variable(lambda: torch.tensor(10.0 + replica_first()), aggregation=SUM)
            kept.setdefault("v", made_here)
        kept["v"].assign_add(number())
        return kept["v"]

    def replica_first() -> int:
        calls.append(1)
        return 0

    seen: set[int] = set()
    calls: list[int] = []
    total = sum(aggregated(NONE, strategy.num_replicas_in_sync))
    for times in (1, 2):
        variable = strategy.run(step)
        assert isinstance(variable, Variable)
        assert numbers(variable) == [10 + times * total] * strategy.num_replicas_in_sync
    assert calls == [1]


def test_an_argument_of_run_stays_a_variable(pair: MirroredStrategy) -> None:
    variable = made(pair, 0.0, SUM)

    for _ in range(2):
        pair.run(lambda v: v.assign_add(number()), args=(variable,))

    assert numbers(variable) == [6, 6]


def test_components_share_a_storage_unless_they_may_differ() -> None:
    with replicas(3) as strategy:
        for synchronization, aggregation, num_storages in [
            *((ON_WRITE, one, 1) for one in (SUM, MEAN, FIRST)),
            (ON_WRITE, NONE, 3),
            *((ON_READ, one, 3) for one in VariableAggregation),
        ]:
            variable = made(strategy, 1.0, aggregation, synchronization)

            assert len({part.data_ptr() for part in variable.values}) == num_storages
            assert len(variable.owners) == num_storages
        with separate_memories():
            assert made(strategy, 1.0, SUM).owners == (0, 1, 2)


# ON_WRITE


@each_aggregation
def test_assign_on_replicas_aggregates(
    strategy: MirroredStrategy, aggregation: VariableAggregation
) -> None:
    variable = made(strategy, 9.0, aggregation)

    for _ in range(2):
        strategy.run(lambda: variable.assign(number()))
        assert numbers(variable) == aggregated(aggregation, strategy.num_replicas_in_sync)


@each_aggregation
def test_assign_add_and_sub_on_replicas_aggregate(
    strategy: MirroredStrategy, aggregation: VariableAggregation
) -> None:
    variable = made(strategy, 1.0, aggregation)
    change = aggregated(aggregation, strategy.num_replicas_in_sync)

    for _ in range(2):
        strategy.run(lambda: variable.assign_add(number()))
    assert numbers(variable) == [1 + 2 * one for one in change]
    strategy.run(lambda: variable.assign_sub(number()))
    assert numbers(variable) == [1 + one for one in change]


def test_a_mean_of_replica_ids(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.0, MEAN)

    pair.run(lambda: variable.assign_add(replica_id()))
    assert numbers(variable) == [1.5, 1.5]
    pair.run(lambda: variable.assign(replica_id()))
    assert numbers(variable) == [0.5, 0.5]
    variable.assign(5.0)
    pair.run(lambda: variable.assign_sub(replica_id()))
    assert numbers(variable) == [4.5, 4.5]


@pytest.mark.parametrize("aggregation", [NONE, MEAN, FIRST])
def test_a_number_that_all_replicas_give_counts_once(
    strategy: MirroredStrategy, aggregation: VariableAggregation
) -> None:
    variable = made(strategy, 1.0, aggregation)
    all_replicas = strategy.num_replicas_in_sync

    for times in (1, 2):
        strategy.run(lambda: variable.assign_add(5.1))
        expected = float(torch.tensor(1.0) + 5.1 if times == 1 else torch.tensor(1.0) + 5.1 + 5.1)
        assert numbers(variable) == [expected] * all_replicas


@pytest.mark.parametrize("value", [5.0, 0, torch.tensor(5.0)])
def test_a_sum_of_one_value_is_refused(pair: MirroredStrategy, value: Any) -> None:
    variable = made(pair, 1.0, SUM)

    for _ in range(2):
        with pytest.raises(ValueError, match="one value for all replicas"):
            pair.run(lambda: variable.assign(value))
    assert numbers(variable) == [1, 1]


def test_numbers_are_refused_in_sums_even_where_they_differ(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.0, SUM)

    with pytest.raises(UnsupportedError, match="a tensor of its own"):
        pair.run(lambda: variable.assign_add(replica_id() + 1.0))


def test_one_replica_can_assign_a_number_to_a_sum() -> None:
    with replicas(1) as strategy:
        variable = made(strategy, 1.0, SUM)

        strategy.run(lambda: variable.assign(5.0))

        assert numbers(variable) == [5]


@each_aggregation
def test_assignments_for_all_replicas_never_aggregate(
    strategy: MirroredStrategy, aggregation: VariableAggregation
) -> None:
    variable = made(strategy, 1.0, aggregation)
    everywhere = strategy.num_replicas_in_sync

    for _ in range(2):
        with strategy.scope():
            variable.assign(6.0)
        variable.assign_add(2)
        variable.assign_sub(torch.tensor(1.0))
        assert numbers(variable) == [7.0] * everywhere


def test_a_global_step_counts_once_a_step(strategy: MirroredStrategy) -> None:
    step = made(strategy, 0, FIRST, dtype=torch.int64)

    for _ in range(2):
        strategy.run(lambda: step.assign_add(1))

    assert numbers(step) == [2] * strategy.num_replicas_in_sync
    assert step.trainable
    assert not step.value().requires_grad


@each_synchronization
def test_per_replica_values_are_refused_outside_replicas(
    pair: MirroredStrategy, synchronization: VariableSynchronization
) -> None:
    variable = made(pair, 1.0, SUM, synchronization)

    with pytest.raises(UnsupportedError, match="one value for all replicas here, got a PerReplica"):
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

    with pytest.raises(UnequalCallsError, match="same variables in the same way"):
        pair.run(lambda: (a, b)[replica_id()].assign(number()))
    with pytest.raises(UnequalCallsError, match="same variables in the same way"):
        pair.run(lambda: (a.assign, a.assign_add)[replica_id()](number()))
    pair.run(lambda: a.assign(number()))
    assert (numbers(a), numbers(b)) == ([1.5, 1.5], [1, 1])


def test_replicas_that_run_one_by_one_write_the_same() -> None:
    with replicas(3, serial=True) as strategy:
        variable = made(strategy, 1.0, SUM)

        for _ in range(2):
            strategy.run(lambda: variable.assign_add(number()))

        assert numbers(variable) == [13] * 3


# Scatter


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


# ON_READ


@pytest.mark.parametrize(("aggregation", "expected"), [(SUM, 5), (MEAN, 2.5), (FIRST, 2)])
def test_a_read_combines_what_replicas_wrote(
    pair: MirroredStrategy, aggregation: VariableAggregation, expected: float
) -> None:
    variable = made(pair, 1.0, aggregation, ON_READ)

    pair.run(lambda: variable.assign_add(number()))

    assert numbers(variable) == [2, 3]
    for _ in range(2):
        assert variable.value().tolist() == variable.numpy() == float(variable) == expected
    with pair.scope():
        assert float(variable + 1) == expected + 1
    assert [one.tolist() for one in pair.run(lambda: variable * 1).values] == [2, 3]


def test_replica_writes_meet_nobody(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.0, SUM, ON_READ)

    pair.run(lambda: variable.assign(5.0) if replica_id() else None)
    pair.run(lambda: variable.assign_sub(number()) if replica_id() else None)

    assert numbers(variable) == [1, 3]


def test_without_aggregation_nothing_is_read_nor_written(strategy: MirroredStrategy) -> None:
    variable = made(strategy, 1.0, NONE, ON_READ)
    everywhere = strategy.num_replicas_in_sync

    for write in (variable.assign, variable.assign_add, variable.assign_sub):
        with pytest.raises(ValueError, match="nothing was written"):
            write(6.0)
    with pytest.raises(ValueError, match="no one value"):
        variable.value()
    assert numbers(variable) == [1.0] * everywhere
    variable.assign(6.0, read_value=False)
    variable.assign_add(1.0, read_value=False)
    assert numbers(variable) == [7.0] * everywhere
    strategy.run(lambda: variable.assign_add(number()))
    assert numbers(variable) == [8.0 + i for i in range(everywhere)]


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
def test_what_is_assigned_for_all_replicas_is_read_back(
    strategy: MirroredStrategy, aggregation: VariableAggregation
) -> None:
    variable = made(strategy, 1.0, aggregation, ON_READ)
    num_replicas = strategy.num_replicas_in_sync

    assert float(variable) == (num_replicas if aggregation is SUM else 1)
    for _ in range(2):
        assert float(variable.assign(6.0)) == 6
        share = 6 / num_replicas if aggregation is SUM else 6
        assert numbers(variable) == [share] * num_replicas


def test_a_sum_takes_no_additions_for_all_replicas(strategy: MirroredStrategy) -> None:
    variable = made(strategy, 1.0, SUM, ON_READ)

    for write in (variable.assign_add, variable.assign_sub):
        with pytest.raises(ValueError, match="once a replica"):
            write(1.0)
    assert numbers(variable) == [1.0] * strategy.num_replicas_in_sync


@pytest.mark.parametrize("aggregation", [MEAN, FIRST])
def test_others_take_additions_for_all_replicas(
    pair: MirroredStrategy, aggregation: VariableAggregation
) -> None:
    variable = made(pair, 1.0, aggregation, ON_READ)
    pair.run(lambda: variable.assign(number()))

    variable.assign_add(2.0)
    variable.assign_sub(1.0)

    assert numbers(variable) == [2, 3]


def test_an_integer_sum_loses_no_remainder(pair: MirroredStrategy) -> None:
    variable = made(pair, 1, SUM, ON_READ)

    with pytest.raises(ValueError, match="multiple of 2"):
        variable.assign(7)
    assert numbers(variable) == [1, 1]
    variable.assign(8)
    assert numbers(variable) == [4, 4]


@pytest.mark.parametrize("value", [7, -7, 7.5])
def test_a_saved_sum_is_restored_whole(strategy: MirroredStrategy, value: float) -> None:
    variable = made(strategy, value * 0, SUM, ON_READ)

    for _ in range(2):
        variable.load(value)
        assert variable.state().item() == value
    assert max(numbers(variable)) - min(numbers(variable)) <= 1


def test_a_state_is_a_copy(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.0, MEAN)
    state = variable.state()

    variable.assign(2.0)

    assert (state.item(), state.requires_grad) == (1, False)
    variable.load(state)
    assert numbers(variable) == [1, 1]


# Where it is used


def test_other_strategies_may_read_but_not_write(pair: MirroredStrategy) -> None:
    variable, outside = made(pair, 1.5, MEAN, name="w"), Variable(2.0, name="free")

    with replicas(2) as other, other.scope():
        assert (variable * 2).item() == 3
        for write in (variable.assign, variable.load, outside.assign_add):
            with pytest.raises(ContextError, match=r"Variable '(w|free)' was made under"):
                write(1.0)
    assert numbers(variable) == [1.5, 1.5]


def test_a_checkpoint_is_not_for_replicas(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.0, MEAN)

    for call in (variable.state, lambda: variable.load(1.0)):
        with pytest.raises(ContextError, match="called on a replica"):
            pair.run(call)


@each_aggregation
@each_synchronization
def test_outside_every_strategy_there_is_one_replica(
    aggregation: VariableAggregation, synchronization: VariableSynchronization
) -> None:
    variable = Variable(1.0, aggregation=aggregation, synchronization=synchronization)

    variable.assign(5.0)
    variable.assign_add(2)
    assert variable.assign_sub(torch.tensor(1.0)).item() == 6
    assert float(variable) == 6


def test_replicas_see_their_own_component(pair: MirroredStrategy) -> None:
    variable: Any = made(pair, 1.25, NONE)
    factors = PerReplica([torch.tensor(5.0), torch.tensor(3.0)])

    assert [one.item() for one in pair.run(lambda: variable * 2).values] == [2.5, 2.5]
    products = pair.run(lambda factor: factor * variable, args=(factors,))
    assert [one.item() for one in products.values] == [6.25, 3.75]
    pair.run(lambda: variable.assign(number()))
    assert [one.item() for one in pair.run(lambda: torch.add(variable, 1)).values] == [2, 3]
    assert float(variable) == 1


def test_each_replica_has_a_gradient_of_its_own(strategy: MirroredStrategy) -> None:
    variable = made(strategy, [1.0, 2.0], MEAN)

    def step() -> None:
        (variable * (number() ** 2)).sum().backward()

    for times in (1, 2):
        strategy.run(step)
        for i, leaf in enumerate(variable.values):
            assert leaf.is_leaf
            assert leaf.grad.tolist() == [times * (i + 1.0) ** 2] * 2
    variable.assign_sub(variable.values[0].grad)
    assert numbers(variable) == [[-1, 0]] * strategy.num_replicas_in_sync


def test_a_variable_can_be_reduced_and_be_a_destination(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.0, NONE)
    pair.run(lambda: variable.assign(number()))
    ops = pair.extended.cross_device_ops

    for _ in range(2):
        assert pair.extended.reduce_to("mean", variable, "cpu:0").item() == 1.5
        copied = ops.broadcast(torch.tensor(4.0), variable)
        assert isinstance(copied, Mirrored)
        assert copied.devices == variable.devices


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


def test_a_deep_copy_is_apart_and_under_the_same_strategy(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.0, SUM, ON_READ)
    pair.run(lambda: variable.assign(number()))

    duplicate = copy.deepcopy(variable)
    variable.assign(0.0)
    pair.run(lambda: duplicate.assign_add(1.0))

    assert numbers(duplicate) == [2, 3]
    assert float(duplicate) == 5
