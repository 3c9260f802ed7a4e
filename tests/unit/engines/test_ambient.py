import contextvars
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

import unisono as uo

Make = Callable[..., uo.MirroredStrategy]

user = contextvars.ContextVar("user", default="nobody")


def modes() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.empty(1).device.type,
        torch.empty(1).dtype,
    )


@pytest.mark.parametrize(
    "mode",
    [
        torch.no_grad,
        torch.enable_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu"),
        lambda: torch.autocast("cpu", torch.float16),
        lambda: torch.autocast("cpu", enabled=False),
        lambda: torch.device("meta"),
    ],
)
def test_replicas_have_the_modes_of_the_caller(
    mirrored: Make, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    strategy = mirrored()
    outside = modes()

    for _ in range(2):
        with mode():
            inside = modes()
            on_replicas = strategy.experimental_local_results(strategy.run(lambda: [modes()]))
        assert on_replicas == ([inside], [inside])
        after = strategy.experimental_local_results(strategy.run(lambda: [modes()]))
        assert after == ([outside], [outside])


def test_replicas_have_the_default_dtype(mirrored: Make) -> None:
    strategy = mirrored()

    torch.set_default_dtype(torch.float64)
    try:
        dtype = strategy.run(lambda: torch.zeros(1).dtype)
    finally:
        torch.set_default_dtype(torch.float32)

    assert dtype is torch.float64


def test_replicas_have_the_default_device(mirrored: Make) -> None:
    strategy = mirrored()

    torch.set_default_device("meta")
    try:
        devices = strategy.run(lambda: torch.zeros(1).device.type)
    finally:
        torch.set_default_device(None)

    assert strategy.experimental_local_results(devices) == ("meta", "meta")


def test_replicas_have_the_context_variables_of_the_caller(mirrored: Make) -> None:
    strategy = mirrored()
    token = user.set("caller")

    seen = strategy.run(user.get)
    strategy.run(lambda: user.set("replica") and None)

    assert seen == "caller"
    assert user.get() == "caller"
    user.reset(token)
    assert strategy.run(user.get) == "nobody"


def test_modes_that_a_replica_leaves_set_do_not_last(mirrored: Make) -> None:
    strategy = mirrored()

    strategy.run(lambda: torch.set_grad_enabled(False) and None)

    assert strategy.run(torch.is_grad_enabled) is True
    assert torch.is_grad_enabled()


def test_autocast_is_used_in_a_step(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = torch.nn.Linear(2, 2)

    def step() -> torch.dtype:
        dtype: torch.dtype = model(torch.ones(1, 2)).dtype
        return dtype

    with torch.autocast("cpu", torch.bfloat16):
        assert strategy.run(step) is torch.bfloat16
    assert strategy.run(step) is torch.float32
