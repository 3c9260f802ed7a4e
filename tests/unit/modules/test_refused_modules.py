"""Modules that cannot be mirrored or used are refused with what to do."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import unisono as uo
from unisono.errors import ContextError

Make = Callable[..., uo.MirroredStrategy]


def test_a_lazy_module_says_what_to_do(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.LazyLinear(2)

    with pytest.raises(ValueError, match="Call the model once"):
        strategy.run(lambda: model(torch.ones(1, 3)))
    model(torch.ones(1, 3))
    assert strategy.run(lambda: tuple(model(torch.ones(1, 3)).shape)).count(2) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchscript_says_what_to_do(mirrored: Make) -> None:
    with pytest.raises(ValueError, match="TorchScript"):
        mirrored().mirror(torch.jit.script(nn.Linear(2, 2)))


def test_a_model_of_another_strategy_is_refused(mirrored: Make) -> None:
    with mirrored().scope():
        model = nn.Linear(2, 2)

    with pytest.raises((RuntimeError, ValueError), match="another strategy"):
        mirrored().mirror(model)


def test_a_model_that_is_not_mirrored_is_refused_in_a_step(mirrored: Make) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match="mirror"):
        mirrored().run(step)


@pytest.mark.parametrize("kind", ["copied", "free"])
def test_parameters_that_replicas_would_share_are_refused(mirrored: Make, kind: str) -> None:
    strategy = mirrored()
    plain = nn.Linear(1, 1, bias=False)
    with strategy.scope():
        weight = torch.zeros(1, 1, requires_grad=True)
        if kind == "copied":
            weight = copy.deepcopy(plain).weight
        optimizer = torch.optim.SGD([weight], lr=1.0)

    def step() -> None:
        weight.sum().backward()
        optimizer.step()

    with pytest.raises(ContextError, match=r"belongs? to no model of"):
        strategy.run(step)
