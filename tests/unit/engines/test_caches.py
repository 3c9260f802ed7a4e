"""Caches that all threads share: no replica depends on when another one leaves a block."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import unisono as uo

SECONDS = 30


def gradient(*, leaves_early: bool) -> Tensor:
    """Replica 0 leaves its block before or after replica 1 has called the model again."""
    has_left, has_called = threading.Event(), threading.Event()
    strategy = uo.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        torch.manual_seed(0)
        model = nn.Linear(64, 64, bias=False)

    def step(x: Tensor) -> None:
        context = uo.get_replica_context()
        assert context is not None
        if context.replica_id_in_sync_group == 0:
            with torch.autocast("cpu", torch.bfloat16):
                y = model(x)
                assert leaves_early or has_called.wait(SECONDS)
            has_left.set()
        else:
            with torch.autocast("cpu", torch.bfloat16):
                y = model(x)
                assert not leaves_early or has_left.wait(SECONDS)
                for _ in range(3):
                    y = model(y)
                has_called.set()
        y.float().square().mean().backward()

    made = torch.Generator().manual_seed(1)
    strategy.run(step, args=(uo.PerReplica([torch.randn(8, 64, generator=made) for _ in "01"]),))
    assert model.weight.grad is not None
    found = model.weight.grad.clone()
    strategy.close()
    return found


def test_the_bits_do_not_depend_on_when_another_replica_leaves_its_block() -> None:
    assert torch.equal(gradient(leaves_early=True), gradient(leaves_early=False))


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("is_cached", [True, False])
def test_the_cache_is_used_again_after_a_run(num_replicas: int, *, is_cached: bool) -> None:
    strategy = uo.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    seen = []

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=is_cached):
            seen.append(torch.is_autocast_cache_enabled())
        seen.append(torch.is_autocast_cache_enabled())

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=is_cached):
        strategy.run(step)
        assert torch.is_autocast_cache_enabled() == is_cached
    assert torch.is_autocast_cache_enabled()
    # A single replica does what plain torch does.
    assert seen == [is_cached and num_replicas == 1] * 2 * num_replicas
    strategy.close()


def test_an_error_in_a_block_leaves_the_cache_on() -> None:
    strategy = uo.MirroredStrategy(["cpu:0", "cpu:1"])

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            raise ValueError("wanted")

    with pytest.raises(ValueError, match="wanted"):
        strategy.run(step)
    assert torch.is_autocast_cache_enabled()
    strategy.close()


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_parametrized_weights_can_be_cached(num_replicas: int) -> None:
    def trained(block: Callable[[], AbstractContextManager[None]]) -> Tensor:
        strategy = uo.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
        with strategy.scope():
            torch.manual_seed(0)
            model = parametrizations.weight_norm(nn.Linear(4, 4))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            with block():
                loss = model(model(x)).square().mean()
            loss.backward()
            optimizer.step()

        for _ in range(3):
            strategy.run(step, args=(torch.ones(2, 4),))
        strategy.close()
        found: Tensor = model.weight.detach().clone()
        return found

    # The step looks it up, because in replicas it is not torch's own.
    torch.testing.assert_close(trained(lambda: parametrize.cached()), trained(nullcontext))
