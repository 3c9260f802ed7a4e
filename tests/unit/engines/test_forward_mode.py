"""Replicas may differentiate in forward mode, for which torch has one level per process."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import jvp

import unisono as uo
from unisono.errors import ContextError, UnsupportedError

# torch scripts derivatives when they are asked for first.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")

Make = Callable[..., uo.MirroredStrategy]


def by_transform(model: nn.Module, x: Tensor) -> Tensor:
    tangent: Tensor = jvp(model, (x,), (torch.ones_like(x),))[1]
    return tangent


def by_dual_level(model: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        given = forward_ad.make_dual(x, torch.ones_like(x))
        tangent: Tensor = forward_ad.unpack_dual(model(given)).tangent
    return tangent


@pytest.mark.parametrize("derivative", [by_transform, by_dual_level])
def test_replicas_get_the_tangents_of_one_device(
    mirrored: Make, derivative: Callable[[nn.Module, Tensor], Tensor]
) -> None:
    strategy = mirrored(3)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 2))
    x = torch.linspace(-1, 1, 48).reshape(12, 4)
    expected = derivative(model, x)
    (batch,) = strategy.experimental_distribute_dataset([x])

    for _ in range(20):
        found = strategy.run(lambda own: derivative(model, own), args=(batch,))
        torch.testing.assert_close(strategy.gather(found, 0), expected)


def test_a_barrier_in_forward_mode_is_refused(mirrored: Make) -> None:
    strategy = mirrored(2)

    def step() -> None:
        context = uo.get_replica_context()
        assert context is not None
        with forward_ad.dual_level():
            context.all_reduce("SUM", torch.ones(()))

    with pytest.raises(UnsupportedError, match=r"all_reduce.*forward-mode differentiation"):
        strategy.run(step)
    with forward_ad.dual_level():
        pass


def test_a_replica_that_stays_in_forward_mode_is_named(mirrored: Make) -> None:
    strategy = mirrored(2)

    with pytest.raises(ContextError, match="has returned inside forward-mode differentiation"):
        strategy.run(lambda: forward_ad.enter_dual_level())
    forward_ad.exit_dual_level()
