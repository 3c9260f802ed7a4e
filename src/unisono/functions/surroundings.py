"""What a step finds outside itself: the variables and attributes that its code names.

A captured step has built in what they were. If one of them is another, the step has another
signature. If the step itself changes one, it cannot be captured.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono.functions.places import Places, is_short
from unisono.functions.signature import CONTAINERS, constant, frozen
from unisono.modules import TORCH_TABLES, Contents


class Surroundings:
    """The variables and attributes that a step, and the functions that it calls, may use."""

    def __init__(
        self, fn: Callable[..., Any], modules: Callable[[], Sequence[nn.Module]] = list
    ) -> None:
        # Those of the strategy, which knows their attributes.
        self._modules = modules
        self._roots = [(getattr(fn, "__qualname__", "the step"), fn)]
        # The names in the code of the step and its functions.
        self._named: set[str] = set()
        # What Python changes in calls that it makes at every replay, too.
        self._changing: set[str] = set()
        self._names: list[str] = []
        self._getters: list[Callable[[], Any]] = []
        self._found: list[Any] = []
        # Tensors among these, and their shapes.
        self._tensors: list[Tensor] = []
        self._shapes: list[torch.Size] = []
        self._contents = Contents()
        self._values: tuple[Hashable, ...] = ()
        self.generators: list[Any] = []
        self.scheduled: set[str] = set()
        self.iterator = ""
        self._look()

    def take(self, objects: Sequence[Any], named: set[str]) -> None:
        """Looks at other objects, too, such as arguments, and at other attributes."""
        known = {id(one) for _, one in self._roots}
        new = [("an argument", one) for one in objects if id(one) not in known]
        if new or not named <= self._named:
            self._roots += new
            self._named |= named
            self._look()

    def key(self) -> Hashable:
        """Returns what is equal as long as they are what they were."""
        if not self._are_current():
            self._look()
        return self._values

    def changed(self) -> str:
        """Returns the name of one that is another than before; empty if none is."""
        if self._are_current():
            return ""
        before = self._by_name()
        self._look()
        now = self._by_name()
        return next((name for name in {**before, **now} if before.get(name) != now.get(name)), "")

    def allow_changes(self) -> None:
        """After a call that Python makes at every replay, too: what it has changed may change."""
        while name := self.changed():
            self._changing.add(name)
            self._look()

    def _by_name(self) -> dict[str, list[Hashable]]:
        # An object and its class may have attributes of one name.
        found: dict[str, list[Hashable]] = {}
        for name, value in zip(self._names, self._values, strict=True):
            found.setdefault(name, []).append(value)
        return found

    def _are_current(self) -> bool:
        found = [get() for get in self._getters]
        if not all(map(operator.is_, found, self._found)):
            # Equal numbers and strings need not be the same objects.
            if list(map(constant, found)) != list(map(constant, self._found)):
                return False
            self._found = found
        return self._contents.are_same() and [one.shape for one in self._tensors] == self._shapes

    def _look(self) -> None:
        seen = Places(self._roots, self._named, self._modules())
        self.generators, self.iterator = seen.generators, seen.iterator
        self.scheduled = seen.scheduled
        places = [one for one in seen.found if one[0] not in self._changing]
        held, tables = (
            [one for one in some if one[0] not in self._changing]
            for some in (seen.containers, seen.tables)
        )
        self._getters = [get for _, get in places]
        self._found = [get() for get in self._getters]
        self._tensors = [one for one in self._found if isinstance(one, Tensor)]
        self._shapes = [one.shape for one in self._tensors]
        self._contents.note([one for _, one in (*held, *tables)])
        self._names = [name for name, _ in (*places, *tables)]
        self._values = (*map(_noted, self._found), *(_plain(table) for _, table in tables))


def _noted(value: Any) -> Hashable:
    if isinstance(value, CONTAINERS) and is_short(value):
        return frozen(value)
    return (constant(value), value.shape) if isinstance(value, Tensor) else constant(value)


def _plain(table: dict[Any, Any]) -> Hashable:
    return frozen({name: one for name, one in table.items() if name not in TORCH_TABLES})
