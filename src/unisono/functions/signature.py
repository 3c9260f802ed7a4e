"""What a captured step depends on: arguments, modules and variables. Another is another capture."""

from __future__ import annotations

import functools
import operator
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules import module as module_of_torch
from torch.utils.hooks import RemovableHandle

from unisono.modules import TORCH_TABLES, Contents, are_same, groups_of, raw
from unisono.values import DistributedValues, take_apart

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_TENSORS = ("_parameters", "_buffers")
_TABLES = (*_TENSORS, "_modules")
CONTAINERS = (list, tuple, set, dict, deque)
# A container may hold itself.
_MAX_DEPTH = 8

_needs_grad = operator.attrgetter("requires_grad")


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
    if isinstance(value, (float, complex)):
        # -0.0 equals 0.0, and no number equals NaN.
        return type(value), repr(value)
    return (type(value), value) if isinstance(value, _CONSTANTS) else Same(value)


class Inputs(NamedTuple):
    """The arguments of a run, taken apart."""

    key: Hashable
    tensors: list[Tensor]
    # Neither tensors nor plain values of Python.
    objects: list[Any]
    reason: str


# Each is read without a call of Python, as there are tensors of every replica.
_looks_of = operator.attrgetter("layout", "device", "requires_grad", "shape", "dtype")
_attributes_of = operator.attrgetter("__dict__")


def is_input(value: Any) -> bool:
    """Whether a part of an argument is a tensor whose values may differ from call to call."""
    # Most are plain tensors, which is seen at once.
    is_tensor = type(value) is Tensor or isinstance(value, Tensor)
    return is_tensor and (type(value) is Tensor or not isinstance(value, Parameter))


def read_inputs(args: Sequence[Any], kwargs: dict[str, Any], kind: str) -> Inputs:
    """Takes the arguments of a run apart, for replicas on a kind of device."""
    tensors: list[Tensor] = []
    objects: list[Any] = []
    tree, leaves = take_apart((args, kwargs) if kwargs else args)
    # Not the tree itself, which holds the arguments.
    key: list[Any] = [tree.paths, tree.kinds, bool(kwargs)]
    for leaf in leaves:
        is_distributed = isinstance(leaf, DistributedValues)
        key.append(type(leaf) if is_distributed else None)
        parts = leaf.values if is_distributed else (leaf,)
        if {*map(type, parts)} == {Tensor}:
            tensors += parts
            continue
        for part in parts:
            key.append(None if is_input(part) else constant(part))
            if is_input(part):
                tensors.append(part)
            elif not isinstance(part, _CONSTANTS):
                objects.append(part)
    if tensors:
        looks = list(map(_looks_of, tensors))
        layouts, devices, need_grad, *_ = map(set, zip(*looks, strict=True))
        is_plain = layouts == {torch.strided} and {one.type for one in devices} == {kind}
        has_more = need_grad != {False} or any(map(_attributes_of, tensors))
        if not is_plain or has_more or {*map(type, tensors)} != {Tensor}:
            reason = next(filter(None, (_unfit(one, kind) for one in tensors)))
            return Inputs(None, [], [], reason)
        key += looks
        key += map(Tensor.stride, tensors)
    # A step can tell one tensor in two places from two tensors.
    places = list(map(id, tensors))
    key.append(len({*places}) == len(places) or tuple(map(places.index, places)))
    return Inputs(tuple(key), tensors, objects, "")


def _unfit(tensor: Tensor, kind: str) -> str:
    """Says why an argument is more than its values; empty if it is not."""
    if tensor.layout is not torch.strided or tensor.device.type != kind:
        wanted = f"but replicas are on {kind!r}, and only dense tensors are captured"
        return f"an argument is a {tensor.layout} tensor on {tensor.device}, {wanted}"
    if type(tensor) is not Tensor:
        return f"an argument is of the class {type(tensor).__name__}; pass a plain tensor"
    if vars(tensor):
        return f"an argument has the attribute {min(vars(tensor))!r}; pass it separately"
    needs_grad = "an argument requires a gradient; call `requires_grad_()` in the step"
    return needs_grad if tensor.requires_grad else ""


# What the caller has set for its thread, and a captured step has built in.
_MODES: Sequence[Callable[[], Hashable]] = (
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    functools.partial(torch.is_autocast_enabled, "cuda"),
    functools.partial(torch.get_autocast_dtype, "cuda"),
    functools.partial(torch.is_autocast_enabled, "cpu"),
    functools.partial(torch.get_autocast_dtype, "cpu"),
    torch.is_autocast_cache_enabled,
    torch.get_default_dtype,
    torch._C._get_cublas_allow_tf32,
    torch._C._get_cudnn_allow_tf32,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
    torch._C._get_deterministic_algorithms,
    torch._C._get_mkldnn_enabled,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch.backends.mha.get_fastpath_enabled,
)


def modes() -> Hashable:
    """Returns what the caller has set for its thread, and a captured step has built in."""
    return tuple([read() for read in _MODES])


class State:
    """Something that a step depends on: whether it is what it was, and what has changed."""

    def __init__(self) -> None:
        self._contents = Contents()
        # What counts, by name.
        self._named: dict[str, Any] = {}
        # All states that there were, and their numbers.
        self._numbers: dict[Hashable, int] = {}
        self._number = -1

    def number(self) -> int:
        """Returns a number that is the same whenever all is the same."""
        if not self._is_current():
            self._note()
        return self._number

    def changed(self) -> str:
        """Returns the name of one thing that is another than it was; empty if none is."""
        if self._is_current():
            return ""
        before = self._named
        self._note()
        now = self._named
        return next((name for name in {**before, **now} if before.get(name) != now.get(name)), "")

    def _is_current(self) -> bool:
        """Whether all is the same, as far as C can see by one comparison."""
        return self._contents.are_same()

    def _note(self) -> None:
        """Notes what is there now."""
        raise NotImplementedError

    def _take(self, key: Hashable) -> None:
        self._number = self._numbers.setdefault(key, len(self._numbers))


class ModuleState(State):
    """The attributes of some modules: what each is, and where its tensors lie.

    Whether they are the same as before is seen by one comparison in C, as there may be thousands.
    """

    def __init__(
        self,
        find: Callable[[], list[nn.Module]],
        found_in: Sequence[dict[int, Any]] = (),
    ) -> None:
        super().__init__()
        self._find = find
        # The same modules are found as long as these tables hold the same.
        self._found_in = found_in
        # Changes whenever a hook is added to any module or tensor.
        self._next_hook = -1
        self._tensors: list[Tensor] = []
        self.parameters: list[Tensor] = []
        self._addresses: list[int] = []
        self._need_grad: list[bool] = []

    def _is_current(self) -> bool:
        return (
            RemovableHandle.next_id == self._next_hook
            and self._contents.are_same()
            and list(map(Tensor.data_ptr, self._tensors)) == self._addresses
            and list(map(_needs_grad, self.parameters)) == self._need_grad
        )

    def _note(self) -> None:
        modules = self._find()
        tables = [raw(module) for module in modules]
        hooks = _hooks_of_all()
        containers: list[Any] = [*self._found_in, *tables, *filter(None, hooks.values())]
        for table in tables:
            for name, value in table.items():
                if name not in TORCH_TABLES:
                    containers += containers_in(value)
                elif isinstance(value, (dict, set)) and (value or name in _TABLES):
                    # torch's tables of hooks are many, and most of them empty.
                    containers.append(value)
        self._next_hook = RemovableHandle.next_id
        self._tensors = _tensors(tables, *_TENSORS)
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        self.parameters = _tensors(tables, "_parameters")
        self._need_grad = list(map(_needs_grad, self.parameters))
        containers += [hooks for one in self._tensors for hooks in _hooks(one) if hooks]
        self._contents.note(containers)
        self._named = {
            f"{_shown(name, type(module).__name__)} (module {place})": (
                _places(value) if name in _TENSORS else frozen(value)
            )
            for place, (module, table) in enumerate(zip(modules, tables, strict=True))
            for name, value in table.items()
        }
        self._named |= {name: frozen(held) for name, held in hooks.items()}
        # The modules stay alive, so that others cannot have the same identities.
        self._take((tuple(map(Same, modules)), tuple(self._named.items())))


class Members(State):
    """The parameters in each group of some optimizers: what `zero_grad` clears in a replay."""

    def __init__(self, find: Callable[[], list[Any]], found_in: Sequence[dict[int, Any]]) -> None:
        super().__init__()
        self._find = find
        # The same optimizers are found as long as these tables hold the same.
        self._found_in = found_in
        self._optimizers: list[weakref.ref[Any]] = []
        self._lists: list[list[Tensor]] = []
        self._note()

    def _is_current(self) -> bool:
        return self._contents.are_same() and are_same(self._members(), self._lists)

    def _members(self) -> list[list[Tensor]]:
        found = [one for own in self._optimizers if (one := own()) is not None]
        return [group["params"] for one in found for group in groups_of(one)]

    def _note(self) -> None:
        self._optimizers = list(map(weakref.ref, self._find()))
        self._lists = self._members()
        self._contents.note([*self._found_in, *self._lists])
        self._take(tuple(tuple(map(Same, one)) for one in self._lists))


def _hooks_of_all() -> dict[str, dict[int, Any]]:
    """Returns torch's tables of hooks that are called for every module."""
    tables = vars(module_of_torch).items()
    return {
        name: held
        for name, held in tables
        if name.startswith("_global_") and isinstance(held, dict)
    }


def _tensors(tables: Sequence[dict[str, Any]], *names: str) -> list[Tensor]:
    found = (one for table in tables for name in names for one in table[name].values())
    return [one for one in found if one is not None]


def _shown(name: str, cls: str) -> str:
    """Returns what a reason calls an attribute of a module."""
    if name == "_parameters":
        return f"a parameter, or `requires_grad` of one, of {cls}"
    return f"a buffer of {cls}" if name == "_buffers" else f"{cls}.{name}"


def _places(table: dict[str, Tensor | None]) -> Hashable:
    """Returns where the tensors of a table lie. Others in the same place are as good."""
    return tuple(
        (
            (name, None)
            if one is None
            else (
                name,
                one.data_ptr(),
                one.shape,
                one.dtype,
                one.requires_grad,
                *map(frozen, _hooks(one)),
            )
        )
        for name, one in table.items()
    )


def _hooks(tensor: Tensor) -> list[Any]:
    """Returns the tables of hooks of a tensor."""
    return [tensor._backward_hooks, tensor._post_accumulate_grad_hooks]


def frozen(value: Any, depth: int = 0) -> Hashable:
    """Returns what is equal for values that a step cannot tell from one another."""
    if depth == _MAX_DEPTH or not isinstance(value, CONTAINERS):
        return constant(value)
    parts = (*value.keys(), *value.values()) if isinstance(value, dict) else value
    return type(value), tuple(frozen(part, depth + 1) for part in parts)


def containers_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """Yields all that must hold the same objects for `frozen(value)` to be the same."""
    if depth < _MAX_DEPTH and isinstance(value, CONTAINERS):
        if not isinstance(value, tuple):
            yield value
        for part in value.values() if isinstance(value, dict) else value:
            yield from containers_in(part, depth + 1)
