"""Schedulers and `GradScaler`s, which all replicas share."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import lr_scheduler

import unisono as uo
from unit.modules.one_weight import Setup

Make = Callable[..., uo.MirroredStrategy]


@pytest.fixture
def setup(mirrored: Make, memories: str) -> Setup:
    return Setup(mirrored())


@pytest.mark.parametrize("inside", [True, False])
def test_a_scheduler_steps_once(setup: Setup, inside: bool) -> None:
    with setup.strategy.scope():
        scheduler = lr_scheduler.StepLR(setup.optimizer, step_size=1, gamma=0.5)

    def step(x: Tensor) -> float:
        setup.backward(x)
        setup.optimizer.step()
        if inside:
            scheduler.step()
        return float(setup.optimizer.param_groups[0]["lr"])

    rates = []
    for _ in range(3):
        rates.append(setup.strategy.experimental_local_results(setup.run(step))[-1])
        if not inside:
            scheduler.step()

    assert rates == ([0.5, 0.25, 0.125] if inside else [1, 0.5, 0.25])


def test_a_scheduler_made_outside_steps_once(setup: Setup) -> None:
    scheduler = lr_scheduler.ExponentialLR(setup.optimizer, 0.1)

    def step(x: Tensor) -> None:
        setup.backward(x)
        setup.optimizer.step()
        scheduler.step()

    setup.run(step)

    assert scheduler.get_last_lr() == [pytest.approx(0.1)]


def test_reduce_on_plateau(setup: Setup) -> None:
    scheduler = lr_scheduler.ReduceLROnPlateau(setup.optimizer, patience=0, factor=0.5)

    def step(x: Tensor) -> None:
        context = uo.get_replica_context()
        assert context is not None
        scheduler.step(context.all_reduce("MEAN", x.sum()).item())

    for expected in (1, 0.5, 0.25):
        setup.run(step)
        assert setup.optimizer.param_groups[0]["lr"] == expected


def test_the_state_of_a_scheduler_is_that_of_plain_torch(setup: Setup) -> None:
    with setup.strategy.scope():
        scheduler = lr_scheduler.StepLR(setup.optimizer, step_size=1)
    plain = lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0), step_size=1)

    assert scheduler.state_dict() == plain.state_dict()
    pickle.dumps(scheduler.state_dict())
    scheduler.load_state_dict(plain.state_dict())


def test_grad_scaler(setup: Setup) -> None:
    with setup.strategy.scope():
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)

    def step(x: Tensor) -> None:
        setup.optimizer.zero_grad()
        scaler.scale(setup.model(x).sum()).backward()
        scaler.step(setup.optimizer)
        scaler.update()

    for expected, scale in ((-5.5, 8), (-11.0, 16)):
        setup.run(step)
        assert setup.weight == expected
        assert scaler.get_scale() == scale


def test_replicas_that_scale_first_at_the_same_time(
    mirrored: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call of `scale` makes the tensors of a scaler."""
    strategy = mirrored(3)
    with strategy.scope():
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    name, lock = "_lazy_init_scale_growth_tracker", threading.Lock()
    original = getattr(torch.amp.GradScaler, name)

    def late(self: Any, device: torch.device) -> None:
        time.sleep(0.1)
        with lock:
            original(self, device)

    monkeypatch.setattr(torch.amp.GradScaler, name, late)
    scaled = strategy.run(lambda: float(scaler.scale(torch.ones(()))))
    assert strategy.experimental_local_results(scaled) == (4.0, 4.0, 4.0)


def test_an_infinite_gradient_on_one_replica_skips_the_step(setup: Setup) -> None:
    with setup.strategy.scope():
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    bad = uo.PerReplica((torch.ones(1, 1), torch.full((1, 1), float("inf"))))

    def step(x: Tensor) -> None:
        setup.optimizer.zero_grad()
        scaler.scale(setup.model(x).sum()).backward()
        scaler.unscale_(setup.optimizer)
        clip_grad_norm_(setup.model.parameters(), 2.0)
        scaler.step(setup.optimizer)
        scaler.update()

    setup.strategy.run(step, args=(bad,))
    assert (setup.weight, scaler.get_scale()) == (0, 2)
    setup.run(step)
    assert setup.weight == pytest.approx(-2)


def test_all_replicas_see_unscaled_gradients(setup: Setup) -> None:
    """torch does not count a write when it unscales gradients."""
    with setup.strategy.scope():
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(x: Tensor) -> tuple[float, float]:
        setup.optimizer.zero_grad()
        scaler.scale(setup.model(x).sum()).backward()
        scaler.unscale_(setup.optimizer)
        unscaled = gradient()
        clip_grad_value_(setup.model.parameters(), 8.0)
        scaler.step(setup.optimizer)
        scaler.update()
        return unscaled, gradient()

    def step_that_unscales_at_the_update(x: Tensor) -> tuple[float, float]:
        setup.optimizer.zero_grad()
        scaler.scale(setup.model(x).sum()).backward()
        before = gradient()
        scaler.step(setup.optimizer)
        return before, gradient()

    def gradient() -> float:
        assert setup.model.weight.grad is not None
        return setup.model.weight.grad.item()

    for found in setup.strategy.experimental_local_results(setup.run(step)):
        assert found == (5.5, 5.5)
    assert setup.weight == -5.5
    for found in setup.strategy.experimental_local_results(
        setup.run(step_that_unscales_at_the_update)
    ):
        assert found == (22.0, 5.5)
