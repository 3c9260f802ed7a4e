"""Lists, dicts and sets of a module are per replica, as its other attributes are."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from on_replica import replica_id
from torch import nn

import unisono as uo

Make = Callable[..., uo.MirroredStrategy]


def model_with(strategy: uo.Strategy, value: Any) -> Any:
    with strategy.scope():
        model: Any = nn.Linear(2, 2)
        model.held = value
    return model


class Stack(list[int]):
    """A user's own list."""


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Any]]] = {
    "list": (lambda: [9], lambda held, i: held.append(i)),
    "dict": (lambda: {9: 9}, lambda held, i: held.update({i: i})),
    "set": (lambda: {9}, lambda held, i: held.add(i)),
    "deque": (lambda: deque([9], maxlen=4), lambda held, i: held.append(i)),
    "ordered": (lambda: OrderedDict({9: 9}), lambda held, i: held.update({i: i})),
    "default": (lambda: defaultdict(list, {9: [9]}), lambda held, i: held[i].append(i)),
    "counter": (lambda: Counter([9]), lambda held, i: held.update([i])),
    "subclass": (lambda: Stack([9]), lambda held, i: held.append(i)),
    "nested": (lambda: {"a": [[9]]}, lambda held, i: held["a"][0].append(i)),
    "in a tuple": (lambda: ([9], "x"), lambda held, i: held[0].append(i)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_replicas_do_to_a_container_is_their_own(mirrored: Make, kind: str) -> None:
    make, change = CHANGES[kind]
    strategy = mirrored()
    model = model_with(strategy, make())

    def step() -> Any:
        change(model.held, replica_id())
        return repr(model.held), type(model.held).__name__

    for count in (1, 2):
        found = strategy.experimental_local_results(strategy.run(step))
        for i, (text, name) in enumerate(found):
            expected = make()
            for _ in range(count):
                change(expected, i)
            assert text == repr(expected)
            assert name == type(expected).__name__
    assert repr(model.held) == repr(make())


@pytest.mark.parametrize("kind", CHANGES)
def test_what_is_done_between_runs_reaches_the_replicas(mirrored: Make, kind: str) -> None:
    make, change = CHANGES[kind]
    strategy = mirrored()
    model = model_with(strategy, make())
    strategy.run(lambda: change(model.held, replica_id()))

    change(model.held, 7)

    expected = repr(model.held)
    found = strategy.experimental_local_results(strategy.run(lambda: [repr(model.held)]))
    assert found == ([expected], [expected])


def test_an_element_that_is_exchanged_for_an_equal_one_reaches_the_replicas(mirrored: Make) -> None:
    strategy = mirrored()
    model = model_with(strategy, [1])
    strategy.run(lambda: None)

    model.held[0] = 1.0

    assert strategy.run(lambda: type(model.held[0])) is float


def test_one_container_in_two_places_is_one_on_each_replica(mirrored: Make) -> None:
    strategy = mirrored()
    shared: list[int] = []
    with strategy.scope():
        model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[0].held, model[1].held = shared, {"too": shared}

    def step() -> tuple[bool, int]:
        model[0].held.append(replica_id())
        return model[1].held["too"] is model[0].held, model[1].held["too"][-1]

    assert strategy.experimental_local_results(strategy.run(step)) == ((True, 0), (True, 1))
    shared.append(5)
    assert strategy.experimental_local_results(strategy.run(step)) == ((True, 0), (True, 1))
    assert shared == [5]


def test_a_container_that_holds_itself(mirrored: Make) -> None:
    strategy = mirrored()
    loop: list[Any] = []
    loop.append(loop)
    model = model_with(strategy, loop)

    assert strategy.run(lambda: model.held[0] is model.held and model.held is not loop) is True


class Pair(NamedTuple):
    layer: nn.Module
    weight: nn.Parameter


def test_modules_and_parameters_in_containers_are_those_of_the_replica(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model: Any = nn.Sequential(nn.Linear(2, 2))
        layer = model[0]
        model.held = {"layers": [layer], "pair": Pair(layer, layer.weight), layer.weight: "key"}
        model.method = layer.forward

    def step() -> bool:
        held = model.held
        pair = held["pair"]
        held["layers"][0](torch.ones(1, 2)).sum().backward()
        model.method(torch.ones(1, 2)).sum().backward()
        return (
            held["layers"][0] is model[0]
            and pair.layer is model[0]
            and pair.weight is model[0].weight
            and held[model[0].weight] == "key"
            and model.method.__self__ is model[0]
        )

    assert strategy.run(step) is True
    # Other leaves, in a list that is still the same.
    layer.weight.data = torch.zeros(2, 2)
    assert strategy.run(step) is True


def test_a_value_that_is_set_again_reaches_replicas_that_had_another(mirrored: Make) -> None:
    strategy = mirrored()
    model = model_with(strategy, 1)

    def step() -> int:
        model.held += 1
        return int(model.held)

    assert strategy.run(step) == 2
    model.held = 1
    assert strategy.run(step) == 2
    assert strategy.run(step) == 3


def test_hooks_that_are_registered_between_runs_are_called(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(2, 2)
    strategy.run(lambda: model(torch.ones(1, 2)))
    calls: list[int] = []

    model.register_forward_hook(lambda *_: calls.append(replica_id()))
    strategy.run(lambda: model(torch.ones(1, 2)))

    assert sorted(calls) == [0, 1]


class Stubborn(dict[str, int]):
    def __copy__(self) -> Any:
        raise TypeError("not to be copied")


def test_a_container_that_cannot_be_copied_is_shared(mirrored: Make) -> None:
    strategy = mirrored()
    held = Stubborn(a=1)
    model = model_with(strategy, held)

    assert strategy.run(lambda: model.held is held) is True


class Uncounted(tuple[Any, ...]):
    """As the irreducible representations of e3nn are."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_tuple_whose_class_forbids_its_length_is_shared(mirrored: Make) -> None:
    strategy = mirrored()
    held = Uncounted((1, Uncounted((2, 3))))
    model = model_with(strategy, held)

    assert strategy.run(lambda: model.held is held) is True
    model.held = other = Uncounted((1, 2))
    assert strategy.run(lambda: model.held is other) is True
