"""What stands for a tensor without being one: torch functions and operators use its value."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor

from unisono.errors import UnsupportedError
from unisono.values import map_leaves


def _unary(op: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: op(self.value())


def _python(op: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: op(self.value().detach())


def _binary(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda self, other: op(self.value(), other)


def _both(op: Callable[[Any, Any], Any]) -> tuple[Callable[[Any, Any], Any], ...]:
    return _binary(op), lambda self, other: op(other, self.value())


def _refuse_in_place(variable: Any, other: Any) -> Any:
    raise UnsupportedError(
        f"Variable {variable.name!r} is not changed in place by operators or torch functions, "
        "which know no replicas. Use `assign()`, `assign_add()`, `assign_sub()` or `scatter_*()`."
    )


class TensorLike:
    """Can be used wherever torch takes a tensor, but is not changed in place."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """What messages call it."""
        raise NotImplementedError

    def value(self) -> Tensor:
        """Returns the tensor that the running code sees."""
        raise NotImplementedError

    def numpy(self) -> Any:
        """Returns a NumPy array, a copy, of what the running code sees."""
        return self.value().detach().cpu().numpy().copy()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Lets torch functions work on what the running code sees of variables."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        written = [kwargs.get("out")]
        if name.endswith("_") and not name.endswith("__"):
            written += [*args[:1], kwargs.get("input"), kwargs.get("tensor")]
        for one in written:
            if isinstance(one, TensorLike):
                _refuse_in_place(one, name)
        args, kwargs = map_leaves(
            lambda leaf: leaf.value() if isinstance(leaf, TensorLike) else leaf, (args, kwargs)
        )
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Methods and attributes of tensors, but for what would change one component only."""
        if name.startswith("_") or name.endswith("_"):
            raise AttributeError(f"A variable has no attribute {name!r}; see `assign()`.")
        return getattr(self.value(), name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:  # noqa: FBT001
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.value().detach().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.value().detach().__dlpack_device__()

    __hash__ = object.__hash__
    __bool__, __int__, __index__ = _python(bool), _python(int), _python(operator.index)
    __float__, __complex__, __len__ = _python(float), _python(complex), _python(len)
    __neg__, __pos__, __abs__ = _unary(operator.neg), _unary(operator.pos), _unary(abs)
    __invert__, __iter__ = _unary(operator.invert), _unary(iter)
    __getitem__ = _binary(operator.getitem)
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
    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = _refuse_in_place
