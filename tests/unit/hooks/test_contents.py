"""Copies of what hooks keep."""

from __future__ import annotations

import enum
import functools
import itertools
import random
import re
import threading
from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from unisono.errors import UnsupportedError
from unisono.hooks.contents import content_of, restored


class Slotted:
    __slots__ = ("parts",)

    def __init__(self, parts: Any) -> None:
        self.parts = parts


class Mode(enum.Enum):
    FAST = "fast"


class State:
    """Keeps most of what can be kept."""

    def __init__(self) -> None:
        self.errors = {0: torch.ones(3)}
        self.counts = defaultdict(int, a=1)
        self.inner = Slotted([1, (2.5, "text"), {3}, deque([4]), np.arange(2)])
        self.numbers = np.random.RandomState(3)
        self.generator = torch.Generator().manual_seed(5)
        self.model = nn.Linear(1, 1)
        self.dtype = torch.float16
        self.choose = max

    def draw(self) -> tuple[float, Tensor]:
        return self.numbers.rand(), torch.rand(1, generator=self.generator)

    def change(self) -> None:
        self.draw()
        self.errors[0] += 1
        self.errors[1] = torch.zeros(1)
        self.counts["b"] += 1
        self.inner.parts.append(5)

    def hook(self, state: Any, bucket: Any) -> Tensor:
        return self.errors[0]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_copy_goes_on_from_where_its_original_was(in_place: bool) -> None:
    state = State()
    content = content_of(state)
    expected = State().draw()
    state.change()

    found = restored(state, content, in_place=in_place)

    assert (found is state) is in_place
    assert found.errors.keys() == {0}
    assert found.errors[0].tolist() == [1.0] * 3
    assert found.counts == {"a": 1}
    assert found.counts["c"] == 0
    assert found.inner.parts[:4] == [1, (2.5, "text"), {3}, deque([4])]
    assert found.draw() == expected
    # What all replicas share.
    assert (found.model, found.dtype, found.choose) == (state.model, torch.float16, max)
    # A copy of it has no part of the content.
    found.change()
    assert restored(State(), content).errors[0].tolist() == [1.0] * 3


def test_a_method_belongs_to_a_copy() -> None:
    state = State()

    copied = restored(state.hook, content_of(state.hook))
    state.errors[0] += 1

    assert copied(None, None).tolist() == [1.0] * 3


def test_what_cannot_be_copied_is_refused() -> None:
    seen: list[int] = []

    with pytest.raises(UnsupportedError, match=r"'seen'.*`state`"):
        content_of(lambda state, bucket: seen.append(1))


class Numbers(list[int]):
    """Keeps more than attributes, because a class in C is among its bases."""


@pytest.mark.parametrize(
    "kept",
    [
        itertools.count(),
        functools.partial(max, 1),
        random.Random(1),
        re.compile("a"),
        threading.Lock(),
        Numbers([1]),
        ValueError("text"),
    ],
    ids=lambda kept: type(kept).__name__,
)
def test_what_classes_in_c_keep_is_refused(kept: Any) -> None:
    given = State()
    given.inner = Slotted([kept])

    with pytest.raises(
        UnsupportedError, match=rf"{type(kept).__name__} in state\.inner\.parts\[0\]"
    ):
        content_of(given)


def test_members_of_enumerations_stay_what_they_are() -> None:
    copied = restored(Slotted(Mode.FAST), content_of(Slotted(Mode.FAST)))

    assert copied.parts is Mode.FAST
