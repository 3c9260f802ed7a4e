"""Parameters that a step unfreezes itself are trained as on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import unisono as uo
from unit.gradients.test_own_gradients import trained
from unit.modules.test_once_calls import Program, X, Y, loss, same, split, weights

Make = Callable[..., uo.MirroredStrategy]


class InTurns(Program):
    """As pix2pix trains: the second model is frozen at the end of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(1, 1).double()
        # Not drawn, because workers that are threads have one generator.
        self.critic.weight.data.fill_(-0.01)
        self.critic.bias.data.fill_(0.54)
        self.second = torch.optim.SGD(self.critic.parameters(), lr=0.1)

    def score(self, x: Tensor) -> Tensor:
        mean: Tensor = (self.critic(self.model(x)) - 1).square().mean()
        return mean

    def step(self, x: Tensor, y: Tensor) -> None:
        self.critic.requires_grad_(True)
        self.second.zero_grad()
        # Two passes, whose gradients add up.
        self.score(x).backward()
        self.critic(y.reshape(-1, 1)).square().mean().backward()
        clip_grad_norm_(self.critic.parameters(), 0.05)
        self.second.step()
        self.critic.requires_grad_(False)
        self.optimizer.zero_grad()
        self.score(x).backward()
        clip_grad_norm_(self.model.parameters(), 0.05)
        self.optimizer.step()

    def result(self) -> list[Tensor]:
        return weights(self.model, self.critic)


class InTurnsFromTheStart(InTurns):
    """The second model is frozen before the first step, too."""

    def __init__(self) -> None:
        super().__init__()
        self.critic.requires_grad_(False)


class Gradually(Program):
    """The first layer is frozen at first. A hook sees all of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps, self.norms = 0, list[Tensor]()
        self.first = next(self.model.parameters())
        self.first.register_post_accumulate_grad_hook(self.note)
        self.first.requires_grad_(False)

    def note(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.norms.append(parameter.grad.norm())

    def count(self) -> int:
        self.num_steps += 1
        return self.num_steps

    def step(self, x: Tensor, y: Tensor) -> None:
        if uo.once(self.count) > 1:
            self.first.requires_grad_(True)
        self.optimizer.zero_grad()
        loss(self.model, x, y).backward()
        clip_grad_norm_(self.model.parameters(), 0.05)
        self.optimizer.step()

    def result(self) -> list[Tensor]:
        assert len(self.norms) == 2
        return [*weights(self.model), *self.norms]


PROGRAMS: list[type[Program]] = [InTurns, InTurnsFromTheStart, Gradually]


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("program", PROGRAMS)
def test_replicas_end_with_the_weights_of_one_device(
    mirrored: Make, memories: str, program: type[Program], num_replicas: int
) -> None:
    expected = trained(mirrored(1), program, (X, Y))

    same(trained(mirrored(num_replicas), program, split(num_replicas)), expected)


@pytest.mark.parametrize("is_new", [False, True])
def test_sums_of_what_is_unfrozen(mirrored: Make, *, is_new: bool) -> None:
    strategy = mirrored(2, reduce_gradients="SUM")
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False).requires_grad_(not is_new)
    found = []

    def step(x: Tensor) -> Tensor:
        model.requires_grad_(True)
        model.zero_grad()
        model(x).sum().backward()
        model(x).sum().backward()
        model.requires_grad_(False)
        assert model.weight.grad is not None
        return model.weight.grad.clone()

    for _ in range(3):
        parts = strategy.run(step, args=(uo.PerReplica([torch.ones(1, 1), torch.ones(4, 1)]),))
        found += [part.item() for part in parts.values]

    assert found == [10.0] * 6


@pytest.mark.parametrize("op", ["MEAN", "SUM"])
def test_what_cannot_be_trained_is_left_alone(mirrored: Make, op: str) -> None:
    class Quantized(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1, bias=False)
            self.scale = nn.Parameter(torch.tensor([2], dtype=torch.int8), requires_grad=False)
            with torch.inference_mode():
                self.offset = nn.Parameter(torch.ones(1), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    strategy = mirrored(2, reduce_gradients=op)
    with strategy.scope():
        model = Quantized()

    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        model(x).mean().backward()
        assert model.weight.grad is not None
        return model.weight.grad.clone()

    (parts,) = strategy.experimental_distribute_dataset([torch.tensor([[1.0], [2.0], [6.0]])])
    found = [part.item() for part in strategy.run(step, args=(parts,)).values]

    assert found == pytest.approx([6.0] * 2 if op == "MEAN" else [15.0] * 2)
