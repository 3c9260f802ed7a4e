"""Between runs, models and optimizers of a strategy have their own class and attributes."""

from __future__ import annotations

import abc
import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import unisono as uo
from unisono.errors import UnsupportedError

Make = Callable[..., uo.MirroredStrategy]
T = TypeVar("T")


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output


class Abstract(abc.ABC, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    @abc.abstractmethod
    def forward(self, x: Tensor) -> Tensor: ...


class Concrete(Abstract):
    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output


class Typed(Generic[T], Layered):
    """A class with a parameter."""


class Slotless:
    __slots__ = ()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)  # type: ignore[attr-defined]
        return output


class Mixed(Slotless, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)


class Slotted(nn.Module):
    __slots__ = ("factor",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.factor = 1

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) * self.factor
        return output


class Keyed(Layered):
    keys: ClassVar[list[str]] = []

    def __init_subclass__(cls, *, key: str) -> None:
        cls.keys.append(key)


class Registered(Keyed, key="registered"):
    """A class that its base hears of."""


class Meta(type):
    made: ClassVar[list[str]] = []

    def __new__(mcs, name: str, *args: Any) -> Any:
        mcs.made.append(name)
        return super().__new__(mcs, name, *args)


class Metaclassed(Layered, metaclass=Meta):
    """A class of another class."""


class Comparing(Layered):
    """All objects of this class are equal, but they are not the same."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Comparing)

    def __hash__(self) -> int:
        return 1


KINDS = [Concrete, Typed, Mixed, Slotted, Registered, Metaclassed, Comparing]


@pytest.mark.parametrize("cls", KINDS)
def test_classes_of_every_layout_train_and_keep_their_class(mirrored: Make, cls: Any) -> None:
    strategy = mirrored()
    with strategy.scope():
        model, other = cls(), cls()
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1.0)
    before = model.layer.bias.item()

    def step() -> tuple[bool, bool]:
        optimizer.zero_grad()
        (model(torch.ones(3, 2)) + 2 * other(torch.ones(3, 2))).mean().backward()
        optimizer.step()
        return isinstance(model, cls), type(model.layer) is nn.Linear

    assert strategy.run(step) == (True, True)
    assert type(model) is cls
    assert type(model.layer) is nn.Linear
    assert type(optimizer) is torch.optim.SGD
    assert model.layer.bias.item() == pytest.approx(before - 1)
    assert Keyed.keys == ["registered"]
    assert Meta.made == ["Metaclassed"]


def test_what_is_kept_in_slots_reaches_the_replicas(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = Slotted()

    for factor in (3, 4):
        model.factor = factor
        assert strategy.run(lambda: model.factor) == factor


def test_an_object_made_from_the_class_of_a_model_in_a_step_is_plain(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(2, 3)

    def step() -> tuple[Any, ...]:
        made = type(model)(2, 3)
        return type(made), type(copy.deepcopy(model)), model.__class__, isinstance(model, nn.Linear)

    assert strategy.run(step) == (nn.Linear, nn.Linear, nn.Linear, True)


def test_classes_are_given_back_after_a_step_that_fails(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        strategy.run(step)
    assert type(model) is nn.Linear
    assert type(optimizer) is torch.optim.SGD


def test_in_a_merge_call_a_model_is_copied_and_pickled_as_a_plain_one(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def merged(_: uo.Strategy) -> list[type]:
        copies = [
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            copy.deepcopy(optimizer),
        ]
        return [type(one) for one in copies]

    def step() -> Any:
        context = uo.get_replica_context()
        assert context is not None
        return context.merge_call(merged)

    assert strategy.run(step) == [nn.Sequential, nn.Sequential, torch.optim.SGD]


def test_a_parametrization_in_a_merge_call_stays(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(2, 2)

    def step() -> None:
        context = uo.get_replica_context()
        assert context is not None
        context.merge_call(
            lambda _: parametrize.register_parametrization(model, "weight", nn.Identity()) and None
        )

    strategy.run(step)
    assert parametrize.is_parametrized(model, "weight")
    strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())


def test_nothing_of_a_strategy_is_an_attribute_of_a_model(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    strategy.run(lambda: model(torch.ones(1, 2)))

    assert vars(model).keys() == vars(nn.Linear(2, 2)).keys()
    assert vars(optimizer).keys() == vars(torch.optim.SGD([torch.ones(1)])).keys()


def test_a_scheduler_made_before_the_optimizer_was_brought_in(mirrored: Make) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    strategy = mirrored()
    for one in (model, optimizer, scheduler):
        strategy.mirror(one)
    nn.init.zeros_(model.bias)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        scheduler.step()

    strategy.run(step)

    assert model.bias.item() == -1
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_gradients_are_cleared_outside_on_all_replicas(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def accumulate() -> None:
        with strategy.no_sync():
            model(torch.ones(1, 1)).sum().backward()

    def gradient() -> float:
        model(torch.ones(1, 1)).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad.item()

    for clear in (model.zero_grad, optimizer.zero_grad):
        for set_to_none in (False, True):
            strategy.run(accumulate)
            clear(set_to_none)
            assert strategy.run(gradient).values == (1, 1)
            clear(set_to_none)
            assert strategy.run(gradient).values == (1, 1)
            clear()


def test_a_model_and_its_clones_end_when_nobody_has_it_any_more(mirrored: Make) -> None:
    strategy = mirrored()

    def train() -> list[weakref.ref[nn.Module]]:
        with strategy.scope():
            model: Any = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
            model.captured = model[0].forward
        strategy.run(lambda: model(torch.ones(1, 2)))
        return [weakref.ref(one) for one in model.modules()]

    watched = train()
    gc.collect()

    assert [one() for one in watched] == [None] * 3
    strategy.run(lambda: None)
    assert strategy.extended.mirrors.all_leaves == []


def test_a_module_that_torch_put_in_without_telling_is_cloned(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Sequential(nn.Linear(1, 1))
    strategy.run(lambda: model(torch.ones(1, 1)))

    model._modules["0"] = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model[0].weight)  # type: ignore[arg-type]
    strategy.run(lambda: model(torch.full((1, 1), 3.0)).sum().backward())

    assert model[0].weight.grad.item() == 3  # type: ignore[union-attr, operator]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_scripted_module_in_a_model_is_refused(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Sequential(nn.Linear(1, 1))

    with pytest.raises(UnsupportedError, match="TorchScript"):
        model.add_module("scripted", torch.jit.script(nn.Linear(1, 1)))
