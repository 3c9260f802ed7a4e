"""What a captured step depends on: arguments, modules and variables. Another is another capture."""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from unisono.values import DistributedValues, flatten
from unisono.variables import TORCH_TABLES, Contents, raw

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_TENSORS = ("_parameters", "_buffers")
_TABLES = (*_TENSORS, "_modules")
_CONTAINERS = (list, tuple, set, dict)
# A container may hold itself.
_MAX_DEPTH = 8


class Same:
    """An object that equals itself alone, and that is kept as long as this."""

    __slots__ = ("_of",)

    def __init__(self, of: Any) -> None:
        self._of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._of is self._of

    def __hash__(self) -> int:
        return id(self._of)


def constant(value: Any) -> Hashable:
    """Returns what stands for a value of Python in a signature."""
    return (type(value), value) if isinstance(value, _CONSTANTS) else Same(value)


class Inputs(NamedTuple):
    """The arguments of a run, taken apart."""

    key: Hashable
    tensors: list[Tensor]
    reason: str


def is_input(value: Any) -> bool:
    """Whether a part of an argument is a tensor whose values may differ from call to call."""
    # Most are plain tensors, which is seen at once.
    is_tensor = type(value) is Tensor or isinstance(value, Tensor)
    return is_tensor and (type(value) is Tensor or not isinstance(value, Parameter))


def read_inputs(arguments: Any) -> Inputs:
    """Takes the arguments of a run apart."""
    tensors: list[Tensor] = []
    leaves, rebuild = flatten(arguments)
    key: list[Any] = [repr(rebuild([0] * len(leaves)))]
    for leaf in leaves:
        is_distributed = isinstance(leaf, DistributedValues)
        key.append(type(leaf) if is_distributed else None)
        for part in leaf.values if is_distributed else (leaf,):
            if not is_input(part):
                key.append(constant(part))
                continue
            if part.layout is not torch.strided or not part.is_cuda:
                reason = f"an argument is a {part.layout} tensor on {part.device}, not on a GPU"
                return Inputs(None, [], reason)
            key.append((part.shape, part.stride(), part.dtype, part.device, part.requires_grad))
            tensors.append(part)
    return Inputs(tuple(key), tensors, "")


def modes() -> Hashable:
    """Returns what the caller has set for its thread, and a captured step has built in."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
    )


class OuterVariables:
    """The global and outer variables that a function names, as far as they are constants."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        found: Any = inspect.unwrap(fn)
        found = getattr(found, "__func__", found)
        code = getattr(found, "__code__", None)
        self._globals: dict[str, Any] = getattr(found, "__globals__", {})
        self._names: Sequence[str] = [] if code is None else code.co_names
        self._cells: Sequence[Any] = getattr(found, "__closure__", None) or ()
        self._outer: Sequence[str] = [] if code is None else code.co_freevars

    def values(self) -> dict[str, Any]:
        """Returns those that are numbers, strings and the like now."""
        found = {name: self._globals.get(name) for name in self._names if name in self._globals}
        for name, cell in zip(self._outer, self._cells, strict=True):
            try:
                found[name] = cell.cell_contents
            except ValueError:
                continue  # It has none yet.
        return {name: value for name, value in found.items() if isinstance(value, _CONSTANTS)}


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
