"""`torch.autograd.grad` on a replica: the gradients of its own batch, and no meeting."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import unisono as uo

Make = Callable[..., uo.MirroredStrategy]


def linear(strategy: uo.Strategy) -> nn.Linear:
    with strategy.scope():
        return nn.Linear(1, 1, bias=False)


def test_each_replica_has_the_gradient_of_its_own_batch(mirrored: Make) -> None:
    strategy = mirrored()
    model = linear(strategy)

    def step(x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(model(x).mean(), [model.weight])
        assert model.weight.grad is None
        return gradient

    for _ in range(2):
        parts = uo.PerReplica([torch.full((2, 1), 1.0), torch.full((2, 1), 10.0)])
        assert [g.item() for g in strategy.run(step, args=(parts,)).values] == [1, 10]


def test_uneven_batches_do_not_change_what_it_returns(mirrored: Make) -> None:
    strategy = mirrored()
    model = linear(strategy)

    def step(x: Tensor) -> Any:
        (gradient,) = torch.autograd.grad(model(x).mean(), [model.weight])
        context = uo.get_replica_context()
        assert context is not None
        return gradient, context.all_reduce("MEAN", gradient * context.weight)

    parts = uo.PerReplica([torch.full((3, 1), 1.0), torch.full((1, 1), 5.0)])
    own, mean = strategy.run(step, args=(parts,))

    assert [g.item() for g in own.values] == [1, 5]
    assert [g.item() for g in mean.values] == [2, 2]


def test_a_checkpoint_draws_the_same_mask_again(mirrored: Make) -> None:
    strategy = mirrored()
    model = linear(strategy)

    def dropped(x: Tensor) -> Tensor:
        return functional.dropout(model(x), 0.5).exp()

    def step(x: Tensor) -> Any:
        x = x.requires_grad_()
        out: Any = checkpoint(dropped, x, use_reentrant=False)
        (gradient,) = torch.autograd.grad(out.sum(), [x])
        # What was dropped passes no gradient; exp() of it is one.
        return torch.equal(out == 1, gradient == 0), bool((gradient == 0).any())

    same, some = strategy.run(step, args=(uo.PerReplica([torch.ones(64, 1), torch.ones(64, 1)]),))

    assert same is some is True


def test_torch_refuses_the_other_kind_of_checkpoint(mirrored: Make) -> None:
    strategy = mirrored()
    model = linear(strategy)

    def step() -> None:
        x = torch.ones(2, 1, requires_grad=True)
        out: Any = checkpoint(model, x, use_reentrant=True)
        torch.autograd.grad(out.sum(), [x])

    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        strategy.run(step)
    assert strategy.run(lambda: 1) == 1
