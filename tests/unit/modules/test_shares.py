"""One update is shared out over the replicas, and nobody can tell from the result."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import unisono as uo
from unisono.testing import separate_memories

Make = Callable[..., uo.MirroredStrategy]


def trained(
    strategy: uo.Strategy,
    make_optimizer: Callable[..., torch.optim.Optimizer],
    on_update: Callable[..., None] | None = None,
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])
        halves = [model[:2].parameters(), model[2:].parameters()]
        rates = (0.1, 0.01)
        pairs = zip(halves, rates, strict=True)
        groups = [{"params": list(half), "lr": rate} for half, rate in pairs]
        optimizer = make_optimizer(groups)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    if on_update is not None:
        optimizer.register_step_post_hook(on_update)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 512)).square().mean().backward()
        optimizer.step()
        scheduler.step()

    for _ in range(3):
        strategy.run(step)
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The threads in which SGD or Adam have updated parameters."""
    seen: set[int] = set()
    for cls in (torch.optim.SGD, torch.optim.Adam):
        step: Any = cls.step

        @functools.wraps(step)
        def noted(self: Any, *args: Any, step: Any = step, **kwargs: Any) -> Any:
            seen.add(threading.get_ident())
            return step(self, *args, **kwargs)

        monkeypatch.setattr(cls, "step", noted)
    return seen


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_shares_give_the_bits_of_one_update(
    mirrored: Make, optimizer: Any, num_replicas: int, threads: set[int]
) -> None:
    shared = trained(mirrored(num_replicas), optimizer)
    num_threads = len(threads)
    hooked = trained(mirrored(num_replicas), optimizer, lambda *_: None)

    assert num_threads == num_replicas
    assert all(torch.equal(one, other) for one, other in zip(shared, hooked, strict=True))


def test_hooks_of_an_optimizer_are_called_once_a_step(mirrored: Make, threads: set[int]) -> None:
    calls: list[int] = []

    trained(mirrored(), torch.optim.SGD, lambda *_: calls.append(1))

    assert len(calls) == 3
    assert len(threads) == 1


def test_an_optimizer_that_is_not_of_torch_makes_its_update_alone(mirrored: Make) -> None:
    seen: set[int] = set()

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.add(threading.get_ident())
            return super().step(closure)

    trained(mirrored(), Own)

    assert len(seen) == 1


def test_memories_of_their_own_get_one_update(threads: set[int]) -> None:
    with separate_memories():
        strategy = uo.MirroredStrategy(["cpu:0", "cpu:1"])
        trained(strategy, torch.optim.SGD)
        strategy.close()

    assert len(threads) == 1
