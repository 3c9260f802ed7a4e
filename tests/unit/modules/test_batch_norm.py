"""Batch normalization over all replicas keeps what subclasses do in their own `forward`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import unisono as uo
from unisono.errors import UnsupportedError

Make = Callable[..., uo.MirroredStrategy]


class CallsSuper(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu() + 1


class CallsFunctional(nn.BatchNorm2d):
    """As timm's `BatchNormAct2d`: it calls the function, then its own activation."""

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        x = functional.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            self.momentum or 0.0,
            self.eps,
        )
        out: Tensor = self.act(x)
        return out


class CallsNeither(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return torch.batch_norm(
            input,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            self.training,
            0.1,
            self.eps,
            False,
        )


class Function(nn.Module):
    """The function without a module of torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(x, None, None, training=True)


X = torch.linspace(-2, 3, 6 * 2 * 3 * 3, dtype=torch.float64).reshape(6, 2, 3, 3).sin()


def trained(
    strategy: uo.MirroredStrategy, make: Callable[[], nn.Module], x: object
) -> list[Tensor]:
    with strategy.scope():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(2, 2, 2), make(), nn.Conv2d(2, 1, 2)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(part: Tensor) -> None:
        optimizer.zero_grad()
        model(part).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        strategy.run(step, args=(x,))
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


@pytest.mark.parametrize(
    "make", [lambda: nn.BatchNorm2d(2), lambda: CallsSuper(2), lambda: CallsFunctional(2), Function]
)
@pytest.mark.parametrize("sizes", [[3, 3], [3, 2, 1]])
def test_replicas_end_with_the_weights_of_one_device(
    mirrored: Make, make: Callable[[], nn.Module], sizes: list[int]
) -> None:
    expected = trained(mirrored(1), make, X)
    strategy = mirrored(len(sizes), synchronize_batch_norm=True)

    found = trained(strategy, make, uo.PerReplica(X.split(sizes)))

    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


class Checkpointed(nn.Module):
    """Normalizes twice: the second time in the backward pass."""

    def __init__(self, *, keeps_random_state: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2, track_running_stats=False)
        self.keeps_random_state = keeps_random_state

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(
            self.norm, x, use_reentrant=False, preserve_rng_state=self.keeps_random_state
        )
        return out


@pytest.mark.parametrize("keeps_random_state", [True, False])
def test_a_checkpoint_computes_again_over_all_replicas(
    mirrored: Make, keeps_random_state: bool
) -> None:
    def make() -> nn.Module:
        return Checkpointed(keeps_random_state=keeps_random_state)

    expected = trained(mirrored(1), make, X)

    strategy = mirrored(2, synchronize_batch_norm=True)
    found = trained(strategy, make, uo.PerReplica(X.split(3)))

    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def test_a_forward_that_cannot_be_synchronised_is_named(mirrored: Make) -> None:
    strategy = mirrored(2, synchronize_batch_norm=True)

    with pytest.raises(UnsupportedError, match="cannot synchronize CallsNeither"):
        trained(strategy, lambda: CallsNeither(2), uo.PerReplica(X.split(3)))


def test_other_strategies_and_evaluation_are_left_alone(mirrored: Make) -> None:
    synchronized, plain = mirrored(2, synchronize_batch_norm=True), mirrored(2)
    for strategy in (synchronized, plain):
        with strategy.scope():
            model = CallsNeither(2)
        x = torch.tensor([1.0, 3.0]).reshape(2, 1, 1, 1).expand(2, 2, 3, 3)
        model.eval()
        strategy.run(model, args=(uo.PerReplica([x, x]),))
    model.train()
    out = plain.run(model, args=(uo.PerReplica([x, x + 100]),))

    torch.testing.assert_close(out.values[0], out.values[1])
