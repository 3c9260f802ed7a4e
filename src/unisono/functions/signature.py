"""What a captured step depends on: another signature is another capture."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from unisono.values import DistributedValues, flatten

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


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
