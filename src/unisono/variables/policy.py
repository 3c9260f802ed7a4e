"""What a variable promises its replicas, and what may be written to it where."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unisono.errors import UnsupportedError
from unisono.options import ReduceOp, VariableAggregation

_REDUCE_OPS = {VariableAggregation.SUM: ReduceOp.SUM, VariableAggregation.MEAN: ReduceOp.MEAN}


class VariableSynchronization(enum.Enum):
    """When the components of a variable become one: each time it is written, or when it is read.

    `AUTO` means `ON_WRITE`. `NONE` is there for its name in `tf.distribute`; no variable has it.
    """

    AUTO = "auto"
    NONE = "none"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


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


@dataclass(frozen=True)
class VariablePolicy:
    """When and how the components of a variable become one. Checked when made.

    Args:
        synchronization: `AUTO`, `ON_WRITE` or `ON_READ`.
        aggregation: How values of the replicas are combined.
        dtype: The dtype of the variable.
        trainable: Whether components collect gradients; None means unless `ON_READ`.
    """

    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    dtype: torch.dtype
    trainable: bool | None = None

    def __post_init__(self) -> None:
        known = [s for s in VariableSynchronization if s is not VariableSynchronization.NONE]
        if self.synchronization not in known:
            raise UnsupportedError(
                f"`synchronization` must be one of {_listed(known)}, got {self.synchronization!r}."
            )
        if not isinstance(self.aggregation, VariableAggregation):
            raise UnsupportedError(
                f"`aggregation` must be one of {_listed(VariableAggregation)}, got "
                f"{self.aggregation!r}."
            )
        is_real = self.dtype.is_floating_point or self.dtype.is_complex
        if self.aggregation is VariableAggregation.MEAN and not is_real:
            raise UnsupportedError(
                f"A variable of {self.dtype} cannot hold the mean of its replicas' values. Use a "
                f"floating-point dtype, {VariableAggregation.SUM} or "
                f"{VariableAggregation.ONLY_FIRST_REPLICA}."
            )
        if self.trainable is None:
            object.__setattr__(self, "trainable", not self.is_on_read)

    @property
    def is_on_read(self) -> bool:
        """Whether replicas write for themselves, and a read combines what they wrote."""
        return self.synchronization is VariableSynchronization.ON_READ

    @property
    def is_local(self) -> bool:
        """Whether a replica's write changes its own component only, so that they may differ."""
        return self.is_on_read or self.aggregation is VariableAggregation.NONE

    @property
    def collects_gradients(self) -> bool:
        """Whether components require gradients: trainable, and of a dtype that can have them."""
        return bool(self.trainable) and (self.dtype.is_floating_point or self.dtype.is_complex)

    @property
    def reduce_op(self) -> ReduceOp | None:
        """How values are reduced; None where they are not."""
        return _REDUCE_OPS.get(self.aggregation)

    def check_write(self, write: Write, *, is_on_replica: bool, is_read: bool) -> None:
        """Raises unless the policy lets a replica, or the program for all of them, do `write`."""
        if write.is_scatter:
            self._check_scatter(write)
        elif self.is_on_read and not is_on_replica:
            if write is not Write.ASSIGN and self.aggregation is VariableAggregation.SUM:
                raise UnsupportedError(
                    f"`{write.value}()` for all replicas of an ON_READ variable that is their SUM "
                    "would count once a replica. Call it on a replica, or `assign()` the total."
                )
            if is_read:
                self.check_read(f"`{write.value}()` reads what it wrote; nothing was written. ")

    def check_read(self, why: str = "") -> None:
        """Raises if components cannot be read as one."""
        if self.is_on_read and self.aggregation is VariableAggregation.NONE:
            raise UnsupportedError(
                f"{why}An ON_READ variable with {self.aggregation} has no one value outside its "
                "replicas. Give it an aggregation, read it on a replica, or pass "
                "`read_value=False`."
            )

    def _check_scatter(self, write: Write) -> None:
        if self.is_on_read:
            raise NotImplementedError(
                f"`{write.value}()` is for ON_WRITE variables; this one is ON_READ. Assign the "
                "whole value on the replica."
            )
        exclusive = (Write.SCATTER_MIN, Write.SCATTER_MAX, Write.SCATTER_UPDATE)
        if write in exclusive and self.reduce_op is not None:
            raise NotImplementedError(
                f"`{write.value}()` has no meaning for a variable with {self.aggregation}: rows of "
                f"several replicas cannot be added. Use {VariableAggregation.NONE} or "
                f"{VariableAggregation.ONLY_FIRST_REPLICA}."
            )


def combine_factors(change: Tensor) -> Tensor:
    """Returns a sparse change with one entry a row: the product of all entries of that row."""
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
    return torch.sparse_coo_tensor(
        rows[None], values, change.shape, is_coalesced=True, check_invariants=False
    )


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


def _listed(members: object) -> str:
    return ", ".join(str(member) for member in members)  # type: ignore[attr-defined]
