"""What a step reads from outside in other ways than by a plain name."""

from __future__ import annotations

import argparse
import functools
import queue
import weakref
from collections import UserDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.lr_scheduler import StepLR

import unisono as uo
from unisono.errors import CaptureError
from unisono.functions.surroundings import Surroundings
from unit.functions.program_parts import Mark, recordings, replicas
from unit.functions.programs import tensors_in

rate = 1.0
current: ContextVar[float] = ContextVar("current", default=1.0)

Place = tuple[Callable[[], Any], Callable[[], Any]]


def of_a_string() -> Place:
    held = SimpleNamespace(rate=1.0)
    return lambda: getattr(held, "rate", 0.0), lambda: setattr(held, "rate", 2.0)


def of_strings_in_a_loop() -> Place:
    held = argparse.Namespace(first=1.0, second=1.0)
    return (
        lambda: [getattr(held, name) for name in ("first", "second")],
        lambda: setattr(held, "second", 2.0),
    )


def of_a_dict_of_attributes() -> Place:
    held = SimpleNamespace(rate=1.0)
    return lambda: held.__dict__["rate"], lambda: setattr(held, "rate", 2.0)


def of_the_dict_of_globals() -> Place:
    return lambda: globals()["rate"], lambda: globals().update(rate=rate + 1)


def of_a_user_dict() -> Place:
    held = UserDict(rate=1.0)
    return lambda: held["rate"], lambda: held.update(rate=2.0)


def of_a_context_variable() -> Place:
    return lambda: current.get(), lambda: current.set(current.get() + 1)


def of_a_weak_reference() -> Place:
    held = Rates()
    reference = weakref.ref(held)
    return lambda: reference().rate, lambda: setattr(held, "rate", 2.0)  # type: ignore[union-attr]


class Rates:
    rate = 1.0


def of_a_function_with_a_cache() -> Place:
    held = SimpleNamespace(rate=1.0)

    @functools.lru_cache
    def cached() -> float:
        return float(held.rate)

    return lambda: cached(), lambda: setattr(held, "rate", 2.0)


def of_an_attribute_of_a_parameter() -> Place:
    model: Any = nn.Linear(1, 1)
    model.weight.rate = 1.0
    return lambda: model(model.weight.rate), lambda: setattr(model.weight, "rate", 2.0)


def of_the_shape_of_a_tensor() -> Place:
    held = torch.ones(2)
    return lambda: len(held), lambda: setattr(held, "data", torch.ones(3))


def of_an_optimizer() -> Place:
    optimizer = torch.optim.Adam([torch.ones(1, requires_grad=True)], lr=1.0)
    return (
        lambda: optimizer.param_groups[0]["lr"],
        lambda: optimizer.param_groups[0].update(lr=2.0),
    )


def of_a_scheduler() -> Place:
    scheduler = StepLR(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0), 1)
    return lambda: scheduler.get_last_lr(), lambda: setattr(scheduler, "_last_lr", [2.0])


@pytest.mark.parametrize(
    "make",
    [
        *(of_a_string, of_strings_in_a_loop, of_a_dict_of_attributes, of_the_dict_of_globals),
        *(of_a_user_dict, of_a_context_variable, of_a_weak_reference, of_a_function_with_a_cache),
        *(of_an_attribute_of_a_parameter, of_the_shape_of_a_tensor, of_an_optimizer),
        of_a_scheduler,
    ],
)
def test_where_a_step_may_read_something(make: Callable[[], Place]) -> None:
    step, change = make()
    surroundings = Surroundings(step)
    key = surroundings.number()
    assert surroundings.number() == key
    change()
    assert surroundings.changed() != ""
    assert surroundings.number() != key


def check(
    number: int, program: Callable[[uo.Strategy, Mark], list[Any]], *, is_captured: bool = True
) -> None:
    """Runs a program eagerly and captured, and compares all bits of its results."""

    def ended(mark: Mark) -> list[Tensor]:
        torch.manual_seed(0)
        with replicas("cpu", number) as strategy:
            found = list(tensors_in(program(strategy, mark)))
            assert bool(recordings(strategy)) == (is_captured and mark is not plain)
        return found

    wanted, found = ended(plain), ended(uo.function)
    assert len(found) == len(wanted)
    for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(one, other), f"result {place} of {len(wanted)}"


def plain(step: Callable[..., Any]) -> Callable[..., Any]:
    return step


def parts(strategy: uo.Strategy, number: int, *shape: int) -> uo.PerReplica:
    made = torch.Generator().manual_seed(number)
    count = strategy.num_replicas_in_sync
    return uo.PerReplica([torch.randn(shape, generator=made) for _ in range(count)])


@pytest.mark.parametrize("number", [1, 2])
def test_zero_grad_clears_what_the_groups_hold_now(number: int) -> None:
    def program(strategy: uo.Strategy, mark: Mark) -> list[Any]:
        with strategy.scope():
            model, late = nn.Linear(3, 2), nn.Linear(3, 2)
            optimizer = torch.optim.Adam(model.parameters())

        @mark
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = (model(x) + late(x)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        found: list[Any] = []
        for i in range(10):
            if i == 5:
                optimizer.add_param_group({"params": late.parameters(), "lr": 0.1})
            found.append(strategy.run(step, args=(parts(strategy, i, 4, 3),)))
        return [*found, late.state_dict()]

    check(number, program)


@pytest.mark.parametrize("number", [1, 2])
def test_the_rate_that_a_step_reads_is_that_of_now(number: int) -> None:
    def program(strategy: uo.Strategy, mark: Mark) -> list[Any]:
        with strategy.scope():
            model = nn.Linear(3, 2)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            scheduler = StepLR(optimizer, 4, 0.5)

        @mark
        def step(x: Tensor) -> Any:
            optimizer.zero_grad()
            decay = optimizer.param_groups[0]["lr"] * model.weight.square().sum()
            (model(x).square().mean() + decay).backward()
            optimizer.step()
            return decay.detach(), scheduler.get_last_lr()

        found: list[Any] = []
        for i in range(10):
            loss, rates = strategy.run(step, args=(parts(strategy, i, 4, 3),))
            found += [loss, torch.tensor(rates)]
            scheduler.step()
        return found

    check(number, program)


def test_a_rate_that_the_step_itself_changes_is_not_read_in_it() -> None:
    with replicas("cpu", 1) as strategy:
        with strategy.scope():
            model = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scheduler = StepLR(optimizer, 100)

        @uo.function(strict=True)
        def step(x: Tensor) -> Any:
            model(x).sum().backward()
            optimizer.step()
            scheduler.step()
            return scheduler.get_last_lr()

        with pytest.raises(CaptureError, match=r"reads `scheduler._last_lr`, which StepLR"):
            for i in range(4):
                strategy.run(step, args=(parts(strategy, i, 4, 3),))


def test_a_loss_from_outside_is_read_with_its_tensors() -> None:
    def program(strategy: uo.Strategy, mark: Mark) -> list[Any]:
        criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0]))

        @mark
        def step(x: Tensor) -> Tensor:
            loss: Tensor = criterion(x, torch.tensor([0, 1, 0]))
            return loss

        found: list[Any] = []
        for i in range(12):
            if i == 4:
                criterion.label_smoothing = 0.2
            if i == 8:
                criterion.weight = torch.tensor([2.0, 1.0])
            found.append(strategy.run(step, args=(parts(strategy, i, 3, 2),)))
        return found

    check(2, program)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize(
    "setting",
    [
        functools.partial(torch.backends.mkldnn.flags, enabled=False),
        functools.partial(sdpa_kernel, SDPBackend.MATH),
        None,
    ],
)
def test_settings_by_which_torch_chooses_operators_count(
    setting: Callable[[], AbstractContextManager[Any]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(strategy: uo.Strategy, mark: Mark) -> list[Any]:
        with strategy.scope():
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
            recurrent = nn.LSTM(8, 4)

        @mark
        def step(x: Tensor) -> Any:
            with torch.no_grad():
                y = layer(x)
                return y, recurrent(y)[0], functional.scaled_dot_product_attention(x, x, y)

        found = [strategy.run(step, args=(parts(strategy, i, 2, 40, 8),)) for i in range(5)]
        with monkeypatch.context() as patch:
            if setting is None:
                patch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
                return [*found, strategy.run(step, args=(parts(strategy, 5, 2, 40, 8),))]
            with setting():
                return [*found, strategy.run(step, args=(parts(strategy, 5, 2, 40, 8),))]

    check(1, program)


def test_the_cache_of_autocast_counts() -> None:
    def program(strategy: uo.Strategy, mark: Mark) -> list[Any]:
        with strategy.scope():
            model = nn.Linear(3, 2)

        @mark
        def step(x: Tensor) -> Any:
            model.zero_grad()
            (model(x).square().mean() + model(2 * x).cos().mean()).backward()
            return [one.grad for one in model.parameters()]

        found: list[Any] = []
        for i in range(8):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=i < 5):
                found += strategy.run(step, args=(parts(strategy, i, 4, 3),))
            found = list(tensors_in(found))
        return found

    check(1, program)


def test_a_queue_gives_another_value_in_every_call() -> None:
    waiting: queue.Queue[Tensor] = queue.Queue()
    with replicas("cpu", 1) as strategy:
        step = uo.function(lambda: waiting.get() * 2)
        for i in range(6):
            waiting.put(torch.tensor(float(i)))
            assert strategy.run(step).item() == 2 * i
