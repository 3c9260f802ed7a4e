"""The methods that write to a variable, or to one component of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unisono.variables.writes import (
    Write,
    apart_from,
    cast,
    change_of_rows,
    check_value,
    combine_factors,
)


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
