"""Gradients of passes within `no_sync()`, which a later pass reduces."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as uo
from unisono.errors import ContextError

Make = Callable[..., uo.MirroredStrategy]


@pytest.mark.parametrize("op", ["MEAN", "SUM"])
def test_gradients_that_wait_are_reduced_by_the_next_pass(op: str, mirrored: Make) -> None:
    """Also those of parameters that this pass does not use."""
    strategy = mirrored(reduce_gradients=op)
    with strategy.scope():
        models = [nn.Linear(1, 1, bias=False) for _ in range(2)]

    def step(x: Tensor) -> list[float]:
        with strategy.no_sync():
            (models[0](x) + models[1](x)).sum().backward()
        models[0](x).sum().backward()
        grads = [model.weight.grad for model in models]
        return [grad.item() for grad in grads if grad is not None]

    inputs = uo.PerReplica((torch.ones(1, 1), torch.full((1, 1), 3.0)))
    for found in strategy.experimental_local_results(strategy.run(step, args=(inputs,))):
        assert found == ([4.0, 2.0] if op == "MEAN" else [8.0, 4.0])


def test_a_post_accumulate_hook_needs_a_reduced_gradient(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(1, 1)
    model.weight.register_post_accumulate_grad_hook(lambda p: None)

    def step() -> None:
        with strategy.no_sync():
            model(torch.ones(1)).backward()

    with pytest.raises(ContextError, match=r"`weight`.*no_sync\(\)` no gradient is reduced"):
        strategy.run(step)
    strategy.run(lambda: model(torch.ones(1)).backward())


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("what", ["optimizer", "model"])
def test_gradients_accumulate_without_reduction_in_every_round(
    what: str, set_to_none: bool, mirrored: Make, memories: str
) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    target: Any = optimizer if what == "optimizer" else model
    inputs = uo.PerReplica((torch.ones(1, 1), torch.full((1, 1), 3.0)))

    def step(x: Tensor, number: int) -> Tensor:
        if number == 0:
            target.zero_grad(set_to_none=set_to_none)
        with strategy.no_sync() if number < 2 else nullcontext():
            model(x).sum().backward()
        if number == 2:
            optimizer.step()
        assert model.weight.grad is not None
        return model.weight.grad.clone()

    for _ in range(3):
        for number, expected in enumerate([(1, 3), (2, 6), (6, 6)]):
            found = strategy.run(step, args=(inputs, number))
            assert tuple(one.item() for one in found.values) == expected
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 6
