"""The modules of a strategy as a captured step has them built in."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unisono.functions.signature import Same, constant
from unisono.variables import TORCH_TABLES, Contents, raw

_TENSORS = ("_parameters", "_buffers")
_TABLES = (*_TENSORS, "_modules")
_CONTAINERS = (list, tuple, set, dict)
# A container may hold itself.
_MAX_DEPTH = 8


class ModuleState:
    """The attributes of some modules: what each is, and where its tensors lie.

    Whether they are the same as before is seen by one comparison in C, as there may be thousands.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._contents = Contents()
        # Changes whenever a hook is added to any module.
        self._next_hook = -1
        self._tensors: list[Tensor] = []
        self.parameters: list[Tensor] = []
        self._addresses: list[int] = []
        self._attributes: dict[str, Hashable] = {}
        # All states that there were, and their numbers.
        self._numbers: dict[Hashable, int] = {}
        self._number = -1

    def number(self, modules: Sequence[nn.Module]) -> int:
        """Returns a number that is the same whenever the modules have the same attributes."""
        if not self._is_current(modules):
            self._note(list(modules))
        return self._number

    def changed(self) -> str:
        """Returns the name of an attribute that is another than it was; empty if none is."""
        if self._is_current(self._modules):
            return ""
        before = self._attributes
        self._note(self._modules)
        now = self._attributes
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return names[0] if names else ""

    def _is_current(self, modules: Sequence[nn.Module]) -> bool:
        return (
            len(modules) == len(self._modules)
            and RemovableHandle.next_id == self._next_hook
            and all(map(operator.is_, modules, self._modules))
            and self._contents.are_same()
            and list(map(Tensor.data_ptr, self._tensors)) == self._addresses
        )

    def _note(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        tables = [raw(module) for module in modules]
        views: list[Any] = list(tables)
        for name, value in itertools.chain.from_iterable(map(dict.items, tables)):
            # torch's tables of hooks are many, and most of them empty.
            is_used = value or name in _TABLES or name not in TORCH_TABLES
            if is_used and isinstance(value, (dict, list, set)):
                views.append(value)
        self._contents.note(views)
        self._next_hook = RemovableHandle.next_id
        self._tensors = [
            tensor
            for table in tables
            for tensor in (*table["_parameters"].values(), *table["_buffers"].values())
            if tensor is not None
        ]
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        self.parameters = [
            parameter
            for table in tables
            for parameter in table["_parameters"].values()
            if parameter is not None
        ]
        self._attributes = {
            f"{type(module).__name__}.{name} (module {place})": (
                _places(value) if name in _TENSORS else frozen(value)
            )
            for place, (module, table) in enumerate(zip(modules, tables, strict=True))
            for name, value in table.items()
        }
        key = tuple(map(Same, modules)), tuple(self._attributes.items())
        self._number = self._numbers.setdefault(key, len(self._numbers))


def _places(table: dict[str, Tensor | None]) -> Hashable:
    """Returns where the tensors of a table lie. Others in the same place are as good."""
    return tuple(
        (name, None if one is None else (one.data_ptr(), one.shape, one.dtype))
        for name, one in table.items()
    )


def frozen(value: Any, depth: int = 0) -> Hashable:
    """Returns what is equal for values that a step cannot tell from one another."""
    if depth == _MAX_DEPTH or not isinstance(value, _CONTAINERS):
        return constant(value)
    parts = (*value.keys(), *value.values()) if isinstance(value, dict) else value
    return type(value), tuple(frozen(part, depth + 1) for part in parts)
