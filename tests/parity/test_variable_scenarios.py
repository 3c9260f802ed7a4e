"""Variables, asked what TensorFlow was asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from on_replica import replica_id as rid
from scenarios import PR, Scenario, check, each, per_replica, x
from torch import Tensor

import unisono as uo

NONE, SUM = uo.VariableAggregation.NONE, uo.VariableAggregation.SUM
MEAN, FIRST = uo.VariableAggregation.MEAN, uo.VariableAggregation.ONLY_FIRST_REPLICA
ON_READ = uo.VariableSynchronization.ON_READ

Ask = Callable[[Any], Any]


def made(strategy: uo.Strategy, value: Any, aggregation: Any, **options: Any) -> uo.Variable:
    with strategy.scope():
        return uo.Variable(value, aggregation=aggregation, **options)


def written(
    value: Any, aggregation: Any, write: Callable[[uo.Variable], Any], **options: Any
) -> Ask:
    """What a variable holds after replicas have written to it."""

    def ask(strategy: uo.Strategy) -> Any:
        variable = made(strategy, value, aggregation, **options)
        strategy.run(lambda: write(variable))
        return variable

    return ask


def assigned(
    value: Any, aggregation: Any, write: Callable[[uo.Variable], Any], **options: Any
) -> Ask:
    """What a variable holds after the program has written to it, and what it is read as."""

    def ask(strategy: uo.Strategy) -> Any:
        variable = made(strategy, value, aggregation, **options)
        before = variable.value() if options and aggregation is not NONE else None
        write(variable)
        return [before, variable, variable.value()]

    return ask


def six_plus_two_minus_one(variable: uo.Variable) -> None:
    variable.assign(6.0)
    variable.assign_add(2.0)
    variable.assign_sub(1.0)


def read(aggregation: Any) -> Ask:
    def ask(strategy: uo.Strategy) -> Any:
        variable = made(strategy, 1.0, aggregation, synchronization=ON_READ)
        strategy.run(lambda: variable.assign_add(x()))
        return variable.value()

    return ask


def scattered(method: str, aggregation: Any) -> Ask:
    def write(variable: uo.Variable) -> None:
        getattr(variable, method)([rid()], torch.tensor([rid() + 2.0]))

    return written([4.0, 4.0, 4.0], aggregation, write)


def multiplied(strategy: uo.Strategy) -> Any:
    variable: Any = made(strategy, 1.25, NONE)
    factors = per_replica(5.0, 3.0)
    return [
        strategy.run(lambda: variable * 2),
        strategy.run(lambda f: variable * f, args=(factors,)),
    ]


def updated(strategy: uo.Strategy) -> Any:
    variable = made(strategy, 1.0, NONE)
    values = uo.Mirrored([torch.tensor(2.0), torch.tensor(3.0)])
    strategy.extended.update(variable, Tensor.copy_, args=(values,), group=False)
    return variable


def initialized(strategy: uo.Strategy) -> Any:
    calls: list[int] = []

    def initial_value() -> Tensor:
        calls.append(1)
        return torch.tensor(7.0)

    return [made(strategy, initial_value, NONE), len(calls)]


def made_inside(strategy: uo.Strategy) -> Any:
    variable = strategy.run(lambda: uo.Variable(x(), name="z"))
    return [variable.name, isinstance(variable, uo.Variable), variable]


def trainable(strategy: uo.Strategy) -> Any:
    return [
        made(strategy, 1.0, SUM, synchronization=ON_READ).trainable,
        made(strategy, 1.0, SUM).trainable,
    ]


ON_READ_OPTION = {"synchronization": ON_READ}

SCENARIOS = [
    Scenario(98, "assign", written(1.0, MEAN, lambda v: v.assign(rid())), PR([0.5, 0.5])),
    Scenario(98, "add", written(1.0, MEAN, lambda v: v.assign_add(rid())), PR([1.5, 1.5])),
    Scenario(98, "sub", written(5.0, MEAN, lambda v: v.assign_sub(rid())), PR([4.5, 4.5])),
    Scenario(99, "add 5", written(1.0, MEAN, lambda v: v.assign_add(5.0)), PR([6, 6])),
    Scenario(99, "sub 1", written(5.0, MEAN, lambda v: v.assign_sub(1.0)), PR([4, 4])),
    Scenario(100, "SUM of a number", written(1.0, SUM, lambda v: v.assign(5.0)), ValueError),
    Scenario(100, "on one replica", written(1.0, SUM, lambda v: v.assign(5.0)), PR([5]), 1),
    Scenario(101, "NONE", written(9.0, NONE, lambda v: v.assign(x())), PR([1, 2])),
    Scenario(101, "SUM", written(9.0, SUM, lambda v: v.assign(x())), PR([3, 3])),
    Scenario(101, "MEAN", written(9.0, MEAN, lambda v: v.assign(x())), PR([1.5, 1.5])),
    Scenario(101, "FIRST", written(9.0, FIRST, lambda v: v.assign(x())), PR([1, 1])),
    *(
        Scenario(
            102,
            aggregation.name,
            assigned(1.0, aggregation, six_plus_two_minus_one),
            [None, PR([7, 7]), 7],
        )
        for aggregation in uo.VariableAggregation
    ),
    Scenario(103, "integers have no MEAN", lambda s: made(s, 1, MEAN), ValueError),
    Scenario(
        104,
        "a global step",
        written(0, FIRST, lambda v: v.assign_add(1), dtype=torch.int64),
        PR([1, 1]),
    ),
    Scenario(
        105,
        "ON_READ SUM",
        assigned(1.0, SUM, lambda v: v.assign(6.0), **ON_READ_OPTION),
        [2, PR([3, 3]), 6],
    ),
    Scenario(
        106,
        "ON_READ MEAN",
        assigned(1.0, MEAN, lambda v: v.assign(6.0), **ON_READ_OPTION),
        [1, PR([6, 6]), 6],
    ),
    Scenario(107, "read SUM", read(SUM), 5),
    Scenario(107, "read MEAN", read(MEAN), 2.5),
    Scenario(107, "read FIRST", read(FIRST), 2),
    Scenario(107, "read NONE", read(NONE), ValueError),
    Scenario(
        108,
        "ON_READ SUM takes no additions",
        assigned(1.0, SUM, lambda v: v.assign_add(1.0), **ON_READ_OPTION),
        ValueError,
    ),
    # TensorFlow keeps 3 and 3, and reads 6.
    Scenario(
        109,
        "7 has no half",
        assigned(1, SUM, lambda v: v.assign(7), **ON_READ_OPTION),
        ValueError,
    ),
    Scenario(110, "NONE", scattered("scatter_add", NONE), PR([[6, 4, 4], [4, 7, 4]])),
    Scenario(110, "SUM", scattered("scatter_add", SUM), PR([[6, 7, 4]] * 2)),
    Scenario(110, "MEAN", scattered("scatter_add", MEAN), PR([[5, 5.5, 4]] * 2)),
    Scenario(110, "FIRST", scattered("scatter_add", FIRST), PR([[6, 4, 4]] * 2)),
    Scenario(111, "SUM", scattered("scatter_mul", SUM), PR([[8, 12, 4]] * 2)),
    Scenario(111, "MEAN", scattered("scatter_mul", MEAN), PR([[4, 6, 4]] * 2)),
    Scenario(112, "SUM", scattered("scatter_update", SUM), NotImplementedError),
    Scenario(112, "MEAN", scattered("scatter_update", MEAN), NotImplementedError),
    Scenario(112, "FIRST", scattered("scatter_update", FIRST), PR([[2, 4, 4]] * 2)),
    Scenario(113, "products", multiplied, [PR([2.5, 2.5]), PR([6.25, 3.75])]),
    Scenario(114, "update", updated, PR([2, 3])),
    Scenario(115, "initial value", initialized, [PR([7, 7]), 1]),
    # TensorFlow also names the components.
    Scenario(116, "made in a step", made_inside, ["z", True, PR([1, 1])]),
    Scenario(117, "trainable", trainable, [False, True]),
]


@each(SCENARIOS)
def test_the_answer_is_that_of_tensorflow_or_better(
    scenario: Scenario, memories: str, mirrored: Callable[..., uo.MirroredStrategy]
) -> None:
    check(scenario, mirrored)


def test_no_scenario_is_left_out() -> None:
    assert {one.number for one in SCENARIOS} == set(range(98, 118))
