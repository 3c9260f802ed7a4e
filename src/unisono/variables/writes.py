"""The ways to change a variable, or one component of it, and what they do."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from unisono.errors import UnsupportedError
from unisono.kernels import check_layout
from unisono.values import as_tensor, sparse_of

NUMBERS = (bool, int, float, complex)


class Write(enum.Enum):
    """The ways to change a variable, by the name of the method."""

    ASSIGN = "assign"
    ASSIGN_ADD = "assign_add"
    ASSIGN_SUB = "assign_sub"
    SCATTER_ADD = "scatter_add"
    SCATTER_SUB = "scatter_sub"
    SCATTER_MUL = "scatter_mul"
    SCATTER_DIV = "scatter_div"
    SCATTER_MIN = "scatter_min"
    SCATTER_MAX = "scatter_max"
    SCATTER_UPDATE = "scatter_update"

    @property
    def is_scatter(self) -> bool:
        """Whether it changes some rows only, so that the change is a sparse tensor."""
        return self.name.startswith("SCATTER")

    @property
    def multiplies(self) -> bool:
        """Whether several changes to one row are factors, and not addends."""
        return self in (Write.SCATTER_MUL, Write.SCATTER_DIV)

    def apply(self, component: Tensor, change: Tensor) -> None:
        """Changes `component` in place."""
        _APPLY[self](component.detach(), change)


def cast(value: Any, dtype: torch.dtype | None) -> Tensor:
    """Returns a value as a detached tensor of `dtype`; Python numbers keep their precision."""
    tensor = as_tensor(value).detach()
    if dtype is None or tensor.dtype == dtype:
        return tensor
    if isinstance(value, (*NUMBERS, list, tuple)):
        return torch.as_tensor(value, dtype=dtype)
    return tensor.to(dtype)


def apart_from(components: Iterable[Tensor], change: Tensor) -> Tensor:
    """Returns `change`, or a copy of it if it is seen through one of `components` itself."""
    if change.layout is not torch.strided:
        return change
    storages = {component.untyped_storage().data_ptr() for component in components}
    return change.clone() if change.untyped_storage().data_ptr() in storages else change


def check_value(what: str, value: Any, shape: torch.Size, dtype: torch.dtype) -> None:
    """Raises unless `value` can be written where there is something of `shape` and `dtype`."""
    tensor = as_tensor(value)
    check_layout(tensor, f"What {what} is given")
    if tensor.shape != shape:
        raise UnsupportedError(
            f"{what} takes a value of shape {tuple(shape)} here, got {tuple(tensor.shape)}. Expand "
            "the value first: assignments do not broadcast."
        )
    if not torch.can_cast(tensor.dtype, dtype):
        raise UnsupportedError(
            f"{what} is {dtype} and cannot hold {tensor.dtype} without loss. Convert the value "
            f"with `.to({dtype})` first."
        )


def change_of_rows(
    what: str, indices: Any, updates: Any, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """Returns `updates`, one per row in `indices` or one for all, as a sparse tensor."""
    rows = as_tensor(indices).detach()
    rows = rows if rows.numel() else rows.long()  # An empty list is read as floats.
    if not shape:
        raise UnsupportedError(f"{what} is a scalar and has no rows. Use `assign()`.")
    if rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
        raise UnsupportedError(f"`indices` must be integers, got {rows.dtype}.")
    if rows.numel() and not (int(rows.min()) >= 0 and int(rows.max()) < shape[0]):
        raise UnsupportedError(
            f"`indices` must be from 0 to {shape[0] - 1}, the rows of {what}, got {rows.tolist()}."
        )
    needed = torch.Size([*rows.shape, *shape[1:]])
    if isinstance(updates, NUMBERS):
        updates = as_tensor(updates).expand(needed)
    check_value(what, updates, needed, dtype)
    values = cast(updates, dtype).reshape(rows.numel(), *shape[1:]).to(rows.device, copy=True)
    return sparse_of(1, shape, rows.reshape(1, -1).long(), values, is_coalesced=False)


def combine_factors(change: Tensor) -> Tensor:
    """Returns a sparse change with one entry per row: the product of all entries of that row."""
    rows, places = change._indices()[0].unique(return_inverse=True)
    values = change._values()
    if len(rows) < len(places):
        shape = (-1, *[1] * (values.dim() - 1))
        factors = values.new_ones((len(rows), *values.shape[1:]))
        where = places.view(shape).expand_as(values)
        values = factors.scatter_reduce_(0, where, values, "prod")
    else:
        # Each row comes once: the places say where, and nothing has to be multiplied.
        values = torch.empty_like(values).index_copy_(0, places, values)
    return sparse_of(1, change.shape, rows[None], values, is_coalesced=True)


def _reduce_rows(component: Tensor, change: Tensor, how: str) -> None:
    rows, values = change._indices()[0], change._values()
    where = rows.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
    component.scatter_reduce_(0, where, values, how)


def _multiply_rows(component: Tensor, change: Tensor) -> None:
    rows = change._indices()[0]
    component.index_copy_(0, rows, component.index_select(0, rows) * change._values())


def _divide_rows(component: Tensor, change: Tensor) -> None:
    rows = change._indices()[0]
    is_real = component.is_floating_point() or component.is_complex()
    chosen = component.index_select(0, rows)
    quotient = torch.div(chosen, change._values(), rounding_mode=None if is_real else "trunc")
    component.index_copy_(0, rows, quotient)


_APPLY: dict[Write, Callable[[Tensor, Tensor], object]] = {
    Write.ASSIGN: Tensor.copy_,
    Write.ASSIGN_ADD: Tensor.add_,
    Write.ASSIGN_SUB: Tensor.sub_,
    Write.SCATTER_ADD: lambda t, c: t.index_add_(0, c._indices()[0], c._values()),
    Write.SCATTER_SUB: lambda t, c: t.index_add_(0, c._indices()[0], c._values(), alpha=-1),
    Write.SCATTER_MUL: _multiply_rows,
    Write.SCATTER_DIV: _divide_rows,
    Write.SCATTER_MIN: lambda t, c: _reduce_rows(t, c, "amin"),
    Write.SCATTER_MAX: lambda t, c: _reduce_rows(t, c, "amax"),
    Write.SCATTER_UPDATE: lambda t, c: t.index_copy_(0, c._indices()[0], c._values()),
}


class Assignable:
    """Can be written to as a `tf.Variable` can."""

    __slots__ = ()

    def _write(self, write: Write, given: Any, indices: Any = None, *, is_read: bool) -> Any:
        raise NotImplementedError

    def assign(self, value: Any, *, read_value: bool = True) -> Any:
        """Sets the variable.

        On a replica, the values of all replicas are combined first, by `aggregation`, and all
        replicas must call it. With `NONE`, and for `ON_READ`, each replica sets its own component.
        Outside `run`, all components are set to one value, or to equal shares of it for an
        `ON_READ` sum.

        Args:
            value: A value of the variable's shape that can be read as a tensor.
            read_value: Whether something is returned.

        Returns:
            The component on a replica; elsewhere the components, or what an `ON_READ` variable
            reads as; None without `read_value`.
        """
        return self._write(Write.ASSIGN, value, is_read=read_value)

    def assign_add(self, delta: Any, *, read_value: bool = True) -> Any:
        """Adds `delta` to the variable; see `assign`."""
        return self._write(Write.ASSIGN_ADD, delta, is_read=read_value)

    def assign_sub(self, delta: Any, *, read_value: bool = True) -> Any:
        """Subtracts `delta` from the variable; see `assign`."""
        return self._write(Write.ASSIGN_SUB, delta, is_read=read_value)

    def scatter_add(self, indices: Any, updates: Any, *, read_value: bool = True) -> Any:
        """Adds `updates[i]` to row `indices[i]`, for every i.

        On a replica, SUM applies the updates of all replicas, and MEAN an N-th of them.

        Args:
            indices: The numbers of rows, with repetitions.
            updates: One row per index.
            read_value: Whether something is returned; see `assign`.
        """
        return self._write(Write.SCATTER_ADD, updates, indices, is_read=read_value)

    def scatter_sub(self, indices: Any, updates: Any, *, read_value: bool = True) -> Any:
        """Subtracts from rows; see `scatter_add`."""
        return self._write(Write.SCATTER_SUB, updates, indices, is_read=read_value)

    def scatter_mul(self, indices: Any, updates: Any, *, read_value: bool = True) -> Any:
        """Multiplies rows; see `scatter_add`.

        A mean takes the average factor; a replica without one counts as 0.
        """
        return self._write(Write.SCATTER_MUL, updates, indices, is_read=read_value)

    def scatter_div(self, indices: Any, updates: Any, *, read_value: bool = True) -> Any:
        """Divides rows, integers towards zero; see `scatter_mul`."""
        return self._write(Write.SCATTER_DIV, updates, indices, is_read=read_value)

    def scatter_min(self, indices: Any, updates: Any, *, read_value: bool = True) -> Any:
        """Lowers rows; see `scatter_add`. Not for variables that are a sum or mean."""
        return self._write(Write.SCATTER_MIN, updates, indices, is_read=read_value)

    def scatter_max(self, indices: Any, updates: Any, *, read_value: bool = True) -> Any:
        """Raises rows; see `scatter_add`. Not for variables that are a sum or mean."""
        return self._write(Write.SCATTER_MAX, updates, indices, is_read=read_value)

    def scatter_update(self, indices: Any, updates: Any, *, read_value: bool = True) -> Any:
        """Sets rows; see `scatter_add`. Not for variables that are a sum or mean."""
        return self._write(Write.SCATTER_UPDATE, updates, indices, is_read=read_value)


class Component(Assignable, Tensor):  # type: ignore[misc]
    """One component of a variable: a tensor that can also be written to as a variable can.

    `StrategyExtended.update` gives it to its function. What torch functions make of it are plain
    tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, component: Tensor) -> Component:
        """Returns the same storage."""
        return component.detach().as_subclass(cls)

    def value(self) -> Tensor:
        """Returns a copy of what it is now."""
        return self.as_subclass(Tensor).clone()

    read_value = value

    @torch.no_grad()
    def _write(self, write: Write, given: Any, indices: Any = None, *, is_read: bool) -> Any:
        what = "A variable that is updated"
        if write.is_scatter:
            given = change_of_rows(what, indices, given, self.shape, self.dtype)
            given = combine_factors(given) if write.multiplies else given
        check_value(what, given, self.shape, self.dtype)
        change = apart_from([self], cast(given, self.dtype))
        write.apply(self, change.to(self.device))
        return self if is_read else None
