"""The methods of a variable that change some of its rows."""

from __future__ import annotations

from typing import Any

from unisono.variables.writes import Write


class ChangedByRows:
    """Can be changed row by row."""

    __slots__ = ()

    def _write(self, write: Write, given: Any, indices: Any = None, *, is_read: bool) -> Any:
        raise NotImplementedError

    def scatter_add(self, indices: Any, updates: Any, *, read_value: bool = True) -> Any:
        """Adds `updates[i]` to row `indices[i]`, for every i.

        On a replica, a sum applies what all replicas give, and a mean an N-th of it.

        Args:
            indices: Numbers of rows, which may come several times.
            updates: One row for each of them.
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
