"""Variables that belong to no module, trained as parameters are."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as uo
from unisono.errors import UnsupportedError
from unisono.options import VariableAggregation
from unisono.strategies import MirroredStrategy
from unisono.variables.variable import Variable
from unit.variables.made import (
    MEAN,
    ON_READ,
    each_aggregation,
    made,
    number,
    numbers,
    replica_id,
    replicas,
)


def mean_number(strategy: MirroredStrategy) -> float:
    """The mean of what `number` gives the replicas."""
    return (strategy.num_replicas_in_sync + 1) / 2


def train(strategy: MirroredStrategy, variable: Variable, optimizer: Any) -> None:
    def step() -> None:
        optimizer.zero_grad()
        (variable * number()).sum().backward()
        optimizer.step()

    strategy.run(step)


@each_aggregation
def test_gradients_are_reduced_over_the_replicas(
    strategy: MirroredStrategy, aggregation: VariableAggregation
) -> None:
    variable = made(strategy, [1.0, 2.0], aggregation)
    mean = mean_number(strategy)

    def step() -> Any:
        (variable * number()).sum().backward()
        return variable.grad.tolist()

    for times in (1, 2):
        found = strategy.experimental_local_results(strategy.run(step))[0]
        assert [getattr(part, "values", (part,))[-1] for part in found] == [times * mean] * 2
        assert all(leaf.is_leaf for leaf in variable.values)
        assert [leaf.grad.tolist() for leaf in variable.values] == [
            [times * mean] * 2
        ] * strategy.num_replicas_in_sync


@each_aggregation
def test_an_optimizer_makes_one_update_for_all_replicas(
    strategy: MirroredStrategy, aggregation: VariableAggregation
) -> None:
    with strategy.scope():
        variable = Variable([1.0, 2.0], aggregation=aggregation)
        optimizer = torch.optim.SGD([variable], lr=1.0, momentum=0.5)  # type: ignore[arg-type]
    mean = mean_number(strategy)

    train(strategy, variable, optimizer)
    assert numbers(variable) == [[1 - mean, 2 - mean]] * strategy.num_replicas_in_sync
    train(strategy, variable, optimizer)
    expected = [1 - 2.5 * mean, 2 - 2.5 * mean]
    assert numbers(variable) == [expected] * strategy.num_replicas_in_sync
    assert len(optimizer.state) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda v, w: torch.optim.Adam([v, *w], lr=0.1),
        lambda v, w: torch.optim.Adam([{"params": [v]}, {"params": w}], lr=0.1),
        lambda v, w: torch.optim.Adam([{"params": v}, {"params": iter(w)}], lr=0.1),
        lambda v, w: torch.optim.Adam([("v", v), *((f"w{i}", p) for i, p in enumerate(w))], lr=0.1),
    ],
    ids=["list", "groups", "single", "named"],
)
def test_variables_and_parameters_go_into_one_optimizer(pair: MirroredStrategy, make: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(3, 2)
    scale = nn.Parameter(torch.tensor(2.0))
    with pair.scope():
        model = pair.mirror(copy.deepcopy(plain))
        variable = Variable(2.0)
        optimizer = make(variable, list(model.parameters()))
    reference = make(scale, list(plain.parameters()))
    x = torch.randn(4, 3)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        (model(x) * variable).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        pair.run(step, args=(uo.PerReplica(x.chunk(2)),))
        reference.zero_grad()
        (plain(x) * scale).square().mean().backward()
        reference.step()

    torch.testing.assert_close(torch.tensor(numbers(variable)), scale.detach().expand(2))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert optimizer.state_dict().keys() == reference.state_dict().keys()


def test_an_optimizer_made_outside_the_scope_is_found(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.0)
    optimizer = torch.optim.SGD([variable], lr=1.0)  # type: ignore[arg-type]

    train(pair, variable, optimizer)

    assert numbers(variable) == [-0.5, -0.5]


def test_a_variable_made_in_a_step_is_trained_in_that_step(pair: MirroredStrategy) -> None:
    kept: dict[str, Any] = {}

    def step(x: Tensor) -> float:
        if "v" not in kept:
            variable = Variable([1.0])
            kept.setdefault("v", variable)
        (kept["v"] * x).mean().backward()
        return float(kept["v"].grad)

    # Three samples and one: the mean is over all four.
    parts = uo.PerReplica([torch.tensor([1.0, 1.0, 1.0]), torch.tensor([5.0])])
    for times in (1, 2):
        assert pair.run(step, args=(parts,)).values == (2 * times, 2 * times)


def test_uneven_batches_count_by_their_samples(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.0)

    def step(x: Tensor) -> float:
        (variable * x).mean().backward()
        return float(variable.grad)

    parts = uo.PerReplica([torch.tensor([1.0, 1.0, 1.0]), torch.tensor([5.0])])

    assert pair.run(step, args=(parts,)).values == (2, 2)


def test_the_norm_is_that_of_the_reduced_gradient(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.0)

    def step() -> float:
        (variable * number()).backward()
        return float(nn.utils.clip_grad_norm_([variable], 1.0))  # type: ignore[list-item]

    assert pair.run(step).values == (1.5, 1.5)
    assert variable.values[1].grad.item() == pytest.approx(1)


def test_a_component_captured_before_is_that_of_the_replica(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.0)
    captured = variable.values[0]

    pair.run(lambda: (captured * number()).backward())

    assert [leaf.grad.item() for leaf in variable.values] == [1.5, 1.5]


def test_variables_that_are_read_together_keep_their_gradients_apart(
    pair: MirroredStrategy,
) -> None:
    variable = made(pair, 1.0, MEAN, ON_READ, trainable=True)

    pair.run(lambda: (variable * number()).backward())

    assert [leaf.grad.item() for leaf in variable.values] == [1, 2]
    with pytest.raises(UnsupportedError, match="ON_READ"):
        torch.optim.SGD([variable], lr=1.0)  # type: ignore[arg-type]


def test_what_is_not_trainable_collects_no_gradient(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.0, trainable=False)
    trained = made(pair, 1.0)

    pair.run(lambda: (variable * trained * number()).backward())

    assert [leaf.grad for leaf in variable.values] == [None, None]
    assert trained.values[0].grad.item() == 1.5


def test_components_that_differ_are_one_after_an_update(pair: MirroredStrategy) -> None:
    with pair.scope():
        variable = Variable(0.0)
        optimizer = torch.optim.SGD([variable], lr=1.0)  # type: ignore[arg-type]
    pair.run(lambda: variable.assign(number()))
    pair.run(lambda: None)
    assert numbers(variable) == [1, 2]

    train(pair, variable, optimizer)

    assert numbers(variable) == [-0.5, -0.5]


def test_assignments_between_updates_are_kept(pair: MirroredStrategy) -> None:
    with pair.scope():
        variable = Variable(0.0, aggregation=MEAN)
        optimizer = torch.optim.SGD([variable], lr=1.0)  # type: ignore[arg-type]

    for _ in range(2):
        variable.assign(10.0)
        train(pair, variable, optimizer)
        assert numbers(variable) == [8.5, 8.5]


def test_a_deep_copy_is_trained_on_its_own(pair: MirroredStrategy) -> None:
    variable = made(pair, 1.0)
    duplicate = copy.deepcopy(variable)

    pair.run(lambda: (duplicate * number()).backward())

    assert [leaf.grad for leaf in variable.values] == [None, None]
    assert [leaf.grad.item() for leaf in duplicate.values] == [1.5, 1.5]


def test_a_variable_that_is_no_more_is_let_go(pair: MirroredStrategy) -> None:
    variable, other = made(pair, 1.0), made(pair, 1.0)
    component = weakref.ref(variable.values[0])
    pair.run(lambda v: (v * other).backward(), args=(variable,))

    del variable
    gc.collect()
    pair.run(lambda: (other * number()).backward())

    assert component() is None
    assert len(pair.extended.mirrors.all_leaves) == 1


def test_a_scaler_and_accumulation_work_on_variables(pair: MirroredStrategy) -> None:
    with pair.scope():
        variable = Variable(0.0)
        optimizer = torch.optim.SGD([variable], lr=1.0)  # type: ignore[arg-type]
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step() -> None:
        optimizer.zero_grad()
        with pair.no_sync():
            scaler.scale(variable * number()).backward()
        scaler.scale(variable * number()).backward()
        scaler.step(optimizer)
        scaler.update()

    pair.run(step)

    assert numbers(variable) == [-3, -3]


def test_serial_replicas_train_the_same() -> None:
    with replicas(3, serial=True) as strategy:
        with strategy.scope():
            variable = Variable(0.0)
            optimizer = torch.optim.SGD([variable], lr=1.0)  # type: ignore[arg-type]

        train(strategy, variable, optimizer)

        assert numbers(variable) == [-2] * 3
        assert strategy.run(replica_id).values == (0, 1, 2)


def test_outside_every_strategy_it_is_a_plain_parameter() -> None:
    variable = Variable(1.0)
    optimizer = torch.optim.SGD([variable], lr=1.0)  # type: ignore[arg-type]

    (variable * 3).backward()
    optimizer.step()

    assert numbers(variable) == [-2]
