"""Objects that can be used as a tensor: torch functions and operators use their value.

A replica sees its own component of a distributed value. `contexts`, a higher layer, knows the
current replica and registers a callback here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from unisono.arguments import in_words
from unisono.errors import ReplicaMismatchError, UnsupportedAttributeError, UnsupportedError
from unisono.torch_private import pytree

# Methods that concern the tensor itself, not its value.
_OF_THE_LEAF = frozenset(
    ["data_ptr", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"]
)
_ask: list[Callable[[], int | None]] = [lambda: None]


def set_replica_seen(ask: Callable[[], int | None]) -> None:
    """Registers the function that returns the current replica, or None."""
    _ask[:] = [ask]


def replica_seen() -> int | None:
    """Returns the replica whose components the running code sees, or None."""
    return _ask[0]()


def _unary(op: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: op(self.seen())


def _python(op: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: op(_detached(self.seen()))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _binary(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: op(self.seen(), other)


def _both(op: Callable[[Any, Any], Any]) -> tuple[Callable[[Any, Any], Any], ...]:
    return _binary(op), lambda self, other: op(other, self.seen())


class TensorLike:
    """Has the operators, methods and attributes of a tensor, but cannot be changed in place.

    It can be passed to torch functions, which use what the running code sees of it.
    """

    __slots__ = ()

    def value(self) -> Any:
        """Returns what the running code sees."""
        raise NotImplementedError

    def seen(self) -> Any:
        """Returns what torch functions use. Unlike `value`, it may change later."""
        return self.value()

    def apart(self, result: Any) -> Any:
        """Returns the result of a torch function, without memory that may change later."""
        return result

    def _refuse_change(self, what: str) -> Any:
        raise UnsupportedError(
            f"`{what}` would change a {type(self).__name__} in place, which would change only one "
            "replica's component. Use an operation that returns a new tensor, or a `Variable` with "
            "`assign()`, `assign_add()`, `assign_sub()` or `scatter_*()`."
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets torch functions use what the running code sees of their arguments."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        written = [kwargs.get("out")]
        if name.endswith("_") and not name.endswith("__"):
            written += [*args[:1], kwargs.get("input"), kwargs.get("tensor")]
        for one in written:
            if isinstance(one, TensorLike):
                one._refuse_change(name)
        ours: list[TensorLike] = []

        def seen(leaf: Any) -> Any:
            if not isinstance(leaf, TensorLike):
                return leaf
            ours.append(leaf)
            return leaf.seen()

        args, kwargs = pytree.tree_map(
            seen, (args, kwargs), is_leaf=lambda leaf: isinstance(leaf, TensorLike)
        )
        result = func(*args, **kwargs)
        for one in ours:
            result = one.apart(result)
        return result

    def numpy(self) -> Any:
        """Returns a copy of what the running code sees, as a NumPy array."""
        seen = self.seen()
        return seen.detach().cpu().numpy().copy() if isinstance(seen, Tensor) else np.array(seen)

    def __getattr__(self, name: str) -> Any:
        """Methods and attributes of tensors, except those that would change only one component."""
        if name.startswith("_") or name.endswith("_") or name == "data":
            raise self._missing(name)
        try:
            seen = self.seen()
        except UnsupportedError:
            raise self._missing(name) from None
        attribute = getattr(seen, name)
        if callable(attribute) and name not in _OF_THE_LEAF:
            return getattr(self.value(), name)
        return self.apart(attribute)

    def _missing(self, name: str) -> AttributeError:
        """Returns the error for an attribute that this value does not have."""
        text = f"A {type(self).__name__} has no attribute {name!r}"
        if name.startswith("_") or not hasattr(Tensor, name):
            return AttributeError(f"{text}.")
        return UnsupportedAttributeError(
            f"{text} because it cannot be changed in place. Use an operation that returns a new "
            "tensor, or a `Variable` with `assign()`, `assign_add()` or `assign_sub()`."
        )

    def __format__(self, spec: str) -> str:
        """Formats a scalar as a number; without a `spec`, as `str` does."""
        return format(_detached(self.seen()), spec) if spec else str(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:  # noqa: FBT001
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.seen().detach().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.seen().detach().__dlpack_device__()

    __hash__ = object.__hash__
    __bool__, __int__, __index__ = _python(bool), _python(int), _python(operator.index)
    __float__, __complex__, __len__ = _python(float), _python(complex), _python(len)
    __neg__, __abs__ = _unary(operator.neg), _unary(abs)
    __invert__ = _unary(operator.invert)

    def __pos__(self) -> Any:
        return self.value()

    def __iter__(self) -> Any:
        return iter(self.value())

    def __getitem__(self, place: Any) -> Any:
        return self.apart(self.seen()[place])

    __eq__, __ne__ = _binary(operator.eq), _binary(operator.ne)
    __lt__, __le__ = _binary(operator.lt), _binary(operator.le)
    __gt__, __ge__ = _binary(operator.gt), _binary(operator.ge)
    __add__, __radd__ = _both(operator.add)
    __sub__, __rsub__ = _both(operator.sub)
    __mul__, __rmul__ = _both(operator.mul)
    __truediv__, __rtruediv__ = _both(operator.truediv)
    __floordiv__, __rfloordiv__ = _both(operator.floordiv)
    __mod__, __rmod__ = _both(operator.mod)
    __pow__, __rpow__ = _both(operator.pow)
    __matmul__, __rmatmul__ = _both(operator.matmul)
    __and__, __rand__ = _both(operator.and_)
    __or__, __ror__ = _both(operator.or_)
    __xor__, __rxor__ = _both(operator.xor)


def as_tensor(value: Any) -> Tensor:
    """Reads a tensor, an array with `__dlpack__` or `__array__`, a number, or a list of numbers.

    Arrays are shared, not copied, if torch can view their memory. For a distributed value, it
    returns the component that the running code sees.
    """
    if isinstance(value, Tensor):
        return value
    try:
        if isinstance(value, TensorLike):
            return as_tensor(value.seen())
        if hasattr(value, "__dlpack__") and not isinstance(value, (np.ndarray, np.generic)):
            return from_dlpack(value)
        if hasattr(value, "__array__"):
            return torch.from_numpy(_viewable(np.asarray(value)))
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise ReplicaMismatchError(
            f"Cannot read {in_words(value)} of type {type(value).__name__} as a tensor: {error}. "
            "Give a tensor, a number, or anything with `__dlpack__` or `__array__`."
        ) from error


def _viewable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Copies an array that torch cannot view: read-only, odd strides, foreign byte order."""
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    is_odd = any(stride < 0 or stride % array.itemsize for stride in array.strides)
    return array.copy() if is_odd or not array.flags.writeable else array
