"""A state that an input cannot resume from is refused, and changes nothing."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from unisono.errors import UnsupportedError
from unit.input.resumable import MAKERS, from_function, loader, split_over_two

# From Python 3.12 on, starting workers by fork warns once torch has its own threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def test_an_input_that_is_shorter_than_the_saved_one_is_refused() -> None:
    iterator = iter(split_over_two([torch.arange(2)] * 3))
    for _ in range(3):
        next(iterator)
    resumed = split_over_two([torch.arange(2)] * 2)
    resumed.load_state_dict(iterator.state_dict())

    with pytest.raises(
        UnsupportedError, match="3 batches into the input, but this input has only 2"
    ):
        iter(resumed)


def test_a_state_of_other_generators_is_refused() -> None:
    iterator = iter(split_over_two(loader(generator=torch.Generator())))
    resumed = split_over_two(loader())
    resumed.load_state_dict(iterator.state_dict())

    with pytest.raises(UnsupportedError, match=r"with 1 random generators.* has 1 sources with 0"):
        iter(resumed)


def test_a_state_of_another_number_of_batches_a_step_is_refused() -> None:
    iterator = iter(from_function(loader()))
    resumed = split_over_two(loader())
    resumed.load_state_dict(iterator.state_dict())

    with pytest.raises(UnsupportedError, match="2 batches per step, but this one takes 1"):
        iter(resumed)


@pytest.mark.parametrize("wrong", [None, {}, {"num_steps": 3}], ids=str)
def test_what_is_no_state_is_refused(wrong: Any) -> None:
    with pytest.raises(UnsupportedError, match="state of an input must have"):
        split_over_two(loader()).load_state_dict(wrong)


def damaged(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {**state, **changes}


def with_random(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda state: {**state, "at_start": ({**state["at_start"][0], **changes},)}


DAMAGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nothing": lambda state: None,
    "a list": lambda state: list(state),
    "empty": lambda state: {},
    "keys that cannot be sorted": lambda state: {1: 2, "a": 3},
    "one field less": lambda state: {k: v for k, v in state.items() if k != "num_steps"},
    "negative steps": damaged(num_steps=-1),
    "steps as text": damaged(num_steps="2"),
    "steps that are no number": damaged(num_steps=float("nan")),
    "no batches": damaged(batches_per_step=0),
    "no steps of a batch": damaged(steps_per_batch=0),
    "a batch size that is none": damaged(batch_size="4"),
    "sources that are none": damaged(was_running=3),
    "no tuple of random states": damaged(at_start=3),
    "no random states": damaged(at_first=(3,)),
    "no state of torch": with_random(torch=None),
    "half a state of torch": with_random(torch=torch.zeros(7, dtype=torch.uint8)),
    "no state of Python": with_random(python=(3, [1, 2], None)),
    "no state of NumPy": with_random(numpy=("MT19937", torch.zeros(3), 0, 0, 0.0)),
    "no states of generators": with_random(generators=[3]),
    "half a state of a generator": with_random(generators=[torch.zeros(7, dtype=torch.uint8)]),
}


def global_states() -> tuple[Any, ...]:
    of_numpy: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), of_numpy[1].tolist()


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_state_is_refused_and_changes_nothing(
    damage: Callable[[dict[str, Any]], Any],
) -> None:
    dataset = MAKERS["own generator"]()
    iterator = iter(dataset)
    next(iterator)
    state = damage(iterator.state_dict())
    before = global_states()

    def load() -> None:
        other = MAKERS["own generator"]()
        other.load_state_dict(state)
        iter(other)

    with pytest.raises(UnsupportedError):
        load()

    assert global_states() == before
