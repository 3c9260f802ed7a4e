"""What a step depends on outside itself."""

from __future__ import annotations

import functools
import itertools
import os
import random
import types
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from unisono.functions.surroundings import Surroundings

rate = 1.0
settings: dict[str, Any] = {"rate": 1.0}


def helper() -> Any:
    return rate, settings["rate"]


class Trainer:
    def __init__(self) -> None:
        self.rate = 1.0
        self.num_steps = 0
        self.optimizers = [object()]

    def step(self) -> Any:
        return self.rate, self.optimizers, hasattr(self, "more")


def test_nothing_has_changed() -> None:
    surroundings = Surroundings(helper)
    key = surroundings.number()
    assert surroundings.number() == key
    assert surroundings.changed() == ""


def test_variables_of_functions_that_a_step_calls_count(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = 2.0

    def step() -> Any:
        return helper(), outer

    surroundings = Surroundings(step)
    keys = [surroundings.number()]
    monkeypatch.setattr("unit.functions.test_surroundings.rate", 2.0)
    keys.append(surroundings.number())
    monkeypatch.setitem(settings, "rate", 3.0)
    keys.append(surroundings.number())
    outer = 3.0
    assert surroundings.changed() == "outer"
    keys.append(surroundings.number())
    assert len(set(keys)) == 4
    outer = 2.0
    assert surroundings.number() == keys[2]


def test_attributes_count_if_the_code_names_them() -> None:
    trainer = Trainer()
    surroundings = Surroundings(trainer.step)
    key = surroundings.number()
    trainer.num_steps += 1
    assert surroundings.number() == key
    trainer.rate = 2.0
    assert surroundings.changed() == "self.rate"
    trainer.optimizers.append(object())
    assert surroundings.changed() == "self.optimizers"
    trainer.more = 1  # type: ignore[attr-defined]
    assert surroundings.changed() == "the attributes of self"


def test_attributes_of_other_objects_count() -> None:
    config = SimpleNamespace(rate=1.0)
    model = Trainer()
    model.config = config  # type: ignore[attr-defined]

    def step(extra: int) -> Any:
        return model.config.rate + extra  # type: ignore[attr-defined]

    surroundings = Surroundings(functools.partial(step, 1))
    key = surroundings.number()
    model.rate = 5.0
    assert surroundings.number() != key
    model.rate = 1.0
    assert surroundings.number() == key


def test_tensors_are_told_apart_by_identity() -> None:
    mask = torch.ones(2)

    def step() -> Any:
        return mask

    surroundings = Surroundings(step)
    key = surroundings.number()
    mask += 1
    assert surroundings.number() == key
    mask = mask.clone()
    assert surroundings.number() != key


def test_long_containers_are_data() -> None:
    data = list(range(5000))

    def step() -> Any:
        return data

    surroundings = Surroundings(step)
    key = surroundings.number()
    data[3] = -1
    assert surroundings.number() == key
    data.append(1)
    assert surroundings.number() != key


def test_what_python_changes_in_every_replay_may_change() -> None:
    calls: list[int] = []
    other = 1

    def step() -> Any:
        return calls, other

    surroundings = Surroundings(step)
    calls.append(1)
    surroundings.allow_changes()
    key = surroundings.number()
    calls.append(2)
    assert surroundings.number() == key
    other = 2
    assert surroundings.changed() == "other"


class Settings:
    rate = 1.0


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = 1.0

    def forward(self, x: Any) -> Any:
        return x * self.rate


class Worker(Settings):
    def __init__(self) -> None:
        self.state = SimpleNamespace(rate=1.0)
        self.seen = 0

    @property
    def current(self) -> Any:
        return self.state.rate

    def inner(self) -> Any:
        return self.current

    def step(self) -> Any:
        return self.inner()

    def __call__(self) -> Any:
        return self.step()


class Slotted:
    __slots__ = ("rate",)

    def __init__(self) -> None:
        self.rate = 1.0


other_module = types.ModuleType("other_module")
other_module.rate = 1.0  # type: ignore[attr-defined]


def of_class() -> tuple[Any, Callable[[], None]]:
    return lambda: Settings.rate, lambda: setattr(Settings, "rate", Settings.rate + 1)


def of_class_of_an_object() -> tuple[Any, Callable[[], None]]:
    worker = Worker()
    return lambda: worker.rate, lambda: setattr(Settings, "rate", Settings.rate + 1)


def of_another_module() -> tuple[Any, Callable[[], None]]:
    return lambda: other_module.rate, lambda: setattr(other_module, "rate", object())


def of_a_default() -> tuple[Any, Callable[[], None]]:
    held = [1.0]

    def step(given: Any = held) -> Any:
        return given[0]

    return step, lambda: held.append(2.0)


def of_a_default_by_name() -> tuple[Any, Callable[[], None]]:
    held = {"rate": 1.0}

    def step(*, given: Any = held) -> Any:
        return given["rate"]

    return step, lambda: held.update(rate=2.0)


def of_a_partial() -> tuple[Any, Callable[[], None]]:
    held = SimpleNamespace(rate=1.0)
    return functools.partial(lambda one: one.rate, held), lambda: setattr(held, "rate", 2.0)


def of_a_method_that_is_called() -> tuple[Any, Callable[[], None]]:
    worker = Worker()
    return worker.step, lambda: setattr(worker.state, "rate", 2.0)


def of_an_object_that_is_called() -> tuple[Any, Callable[[], None]]:
    worker = Worker()
    return worker, lambda: setattr(worker.state, "rate", 2.0)


def of_an_object_in_a_container() -> tuple[Any, Callable[[], None]]:
    held = {"one": [SimpleNamespace(rate=1.0)]}
    return lambda: held["one"][0].rate, lambda: setattr(held["one"][0], "rate", 2.0)


def of_containers_inside_one_another() -> tuple[Any, Callable[[], None]]:
    held = {"one": {"two": [1.0]}}
    return lambda: held["one"]["two"][0], lambda: held["one"]["two"].append(2.0)


def of_a_deque() -> tuple[Any, Callable[[], None]]:
    held = deque([1.0], maxlen=1)
    return lambda: held[0], lambda: held.append(2.0)


def of_a_loss() -> tuple[Any, Callable[[], None]]:
    loss = Loss()
    return lambda: loss(1.0), lambda: setattr(loss, "rate", 2.0)


def of_a_hook() -> tuple[Any, Callable[[], None]]:
    model, held = nn.Linear(1, 1), [1.0]
    model.register_forward_hook(lambda *_: held.append(1.0))
    return lambda: model(1), lambda: held.append(2.0)


def of_a_hook_of_a_parameter() -> tuple[Any, Callable[[], None]]:
    model, held = nn.Linear(1, 1), [1.0]
    model.weight.register_post_accumulate_grad_hook(lambda _: held.append(1.0))
    return lambda: model(1), lambda: held.append(2.0)


def of_a_function() -> tuple[Any, Callable[[], None]]:
    def step() -> Any:
        return step.rate  # type: ignore[attr-defined]

    step.rate = 1.0  # type: ignore[attr-defined]
    return step, lambda: setattr(step, "rate", 2.0)


def of_slots() -> tuple[Any, Callable[[], None]]:
    held = Slotted()
    return lambda: held.rate, lambda: setattr(held, "rate", 2.0)


def of_the_environment() -> tuple[Any, Callable[[], None]]:
    before = os.environ.get("UNISONO_TEST_RATE", "")
    return (
        lambda: os.environ["UNISONO_TEST_RATE"],
        lambda: os.environ.update(UNISONO_TEST_RATE=before + "1"),
    )


@pytest.mark.parametrize(
    "make",
    [
        *(of_class, of_class_of_an_object, of_another_module, of_a_default, of_a_default_by_name),
        *(of_a_partial, of_a_method_that_is_called, of_an_object_that_is_called),
        *(of_an_object_in_a_container, of_containers_inside_one_another, of_a_deque, of_a_loss),
        *(of_a_hook, of_a_hook_of_a_parameter, of_a_function, of_slots, of_the_environment),
    ],
)
def test_where_a_step_may_find_something(
    make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "rate", 1.0)
    monkeypatch.setenv("UNISONO_TEST_RATE", "1")
    step, change = make()
    surroundings = Surroundings(step)
    key = surroundings.number()
    assert surroundings.number() == key
    change()
    assert surroundings.changed() != ""
    assert surroundings.number() != key


def test_what_only_other_methods_name_does_not_count() -> None:
    worker = Worker()
    surroundings = Surroundings(worker.step)
    worker.seen += 1
    assert surroundings.changed() == ""
    # A function that was found by its name alone, as `getattr` does.
    surroundings.take([], {"seen"})
    worker.seen += 1
    assert surroundings.changed() == "self.seen"


def test_what_installed_packages_keep_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> Any:
        return pytest.approx(1.0), rate

    surroundings = Surroundings(step)
    key = surroundings.number()
    monkeypatch.setattr(pytest, "approx", pytest.skip)
    assert surroundings.number() == key


def test_objects_among_the_arguments_count() -> None:
    held = SimpleNamespace(rate=1.0)

    def step(one: Any) -> Any:
        return one.rate

    surroundings = Surroundings(step)
    surroundings.take([held], set())
    held.rate = 2.0
    assert surroundings.changed() == "an argument.rate"


def test_generators_and_iterators_are_found() -> None:
    numbers, others = random.Random(1), np.random.default_rng(1)
    count = itertools.count()
    held = SimpleNamespace(numbers=numbers)

    def step() -> Any:
        return held.numbers.random(), others.random()

    surroundings = Surroundings(step)
    assert {id(one) for one in surroundings.generators} == {id(numbers), id(others)}
    assert surroundings.iterator == ""
    assert Surroundings(lambda: next(count)).iterator == "count"


class OwnSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        self.last_rate = self.param_groups[0]["lr"]
        return super().step(closure)


def test_what_optimizers_keep_does_not_count() -> None:
    optimizer = OwnSGD([torch.ones(1, requires_grad=True)], lr=1.0)
    StepLR(optimizer, 1)  # It puts a wrapper around `step`.
    surroundings = Surroundings(lambda: optimizer.step())
    key = surroundings.number()
    optimizer.param_groups[0]["lr"] = 2.0
    optimizer.step()
    assert surroundings.number() == key
