"""A step leaves models the parameters and submodules that they have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import unisono as uo
from unisono.errors import ContextError

Make = Callable[..., uo.MirroredStrategy]


def made(strategy: uo.MirroredStrategy) -> Any:
    with strategy.scope():
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a parameter replaced": (
        lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(2, 2))),
        "`Linear.weight`",
    ),
    "a parameter removed": (lambda model: setattr(model[1], "bias", None), "`Linear.bias`"),
    "a parameter added": (
        lambda model: model.register_parameter("scale", nn.Parameter(torch.ones(1))),
        "`Sequential.scale`",
    ),
    "a layer added": (lambda model: model.add_module("last", nn.Linear(1, 1)), "`Sequential.last`"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_a_step_sets_is_refused_and_the_next_run_is_as_before(
    mirrored: Make, kind: str
) -> None:
    strategy = mirrored(2)
    model = made(strategy)
    change, name = CHANGES[kind]
    before = {key: value.clone() for key, value in model.state_dict().items()}

    with pytest.raises(ContextError, match=f"{name} was set on a replica.*outside `run`"):
        strategy.run(lambda: change(model))

    seen = strategy.run(lambda: [name for name, _ in model.named_parameters()])
    assert strategy.experimental_local_results(seen)[0] == list(before)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_parameters_that_a_step_freezes_stay_frozen(mirrored: Make) -> None:
    strategy = mirrored(2)
    model = made(strategy)

    strategy.run(lambda: model[0].requires_grad_(False) and None)
    frozen = strategy.run(lambda: [one.requires_grad for one in model.parameters()])

    assert strategy.experimental_local_results(frozen)[0] == [False, False, True, True]
    assert [one.requires_grad for one in model.parameters()] == [False, False, True, True]
    strategy.run(lambda: model.requires_grad_(True) and None)
    assert all(one.requires_grad for one in model.parameters())


def test_replicas_must_agree_on_what_is_trained(mirrored: Make) -> None:
    strategy = mirrored(2)
    model = made(strategy)

    def step() -> None:
        context = uo.get_replica_context()
        assert context is not None
        model[1].requires_grad_(context.replica_id_in_sync_group == 0)

    with pytest.raises(
        ContextError, match=r"`1\.weight` of Sequential is trained on some replicas"
    ):
        strategy.run(step)


def test_a_leaf_that_replicas_share_is_refused(mirrored: Make) -> None:
    strategy = mirrored(2)
    model = made(strategy)
    shared = torch.ones(2, requires_grad=True)

    def step() -> None:
        (model(torch.ones(1, 2)).sum() * shared.sum()).backward()

    with pytest.raises(ContextError, match=r"shape \(2,\) with `requires_grad=True`"):
        strategy.run(step)


def test_a_leaf_that_a_replica_makes_is_its_own(mirrored: Make) -> None:
    strategy = mirrored(2)
    model = made(strategy)

    def step() -> torch.Tensor:
        x = torch.ones(1, 2, requires_grad=True)
        model(x).sum().backward()
        assert x.grad is not None
        return x.grad

    first, second = strategy.run(step).values
    assert torch.equal(first, second)
