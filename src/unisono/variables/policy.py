"""What a variable promises its replicas, what it can be made of, and what may be written where."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.arguments import check_instance, in_words
from unisono.devices import Device, this_machine
from unisono.errors import UnsupportedError
from unisono.modules.leaves import AnyVariable
from unisono.options import ReduceOp, VariableAggregation
from unisono.variables.writes import Write

# Each argument, its default, and what to write instead of another value.
_NEUTRAL: dict[str, tuple[Any, str]] = {
    "validate_shape": (
        True,
        "the shape of a variable does not change. Make another variable for another shape",
    ),
    "caching_device": (None, "every replica reads its own component. Leave it out"),
    "variable_def": (
        None,
        "Unisono has no graphs. Pass `initial_value`, or `load()` the state of a checkpoint",
    ),
    "import_scope": (None, "Unisono has no graphs. Leave it out"),
    "constraint": (
        None,
        "torch's optimizers do not project variables. Project the value after `optimizer.step()`, "
        "with `variable.assign(...)`",
    ),
}


class VariableSynchronization(enum.Enum):
    """When the components of a variable are combined.

    With `ON_WRITE` they are combined each time the variable is written, so all replicas always read
    the same. With `ON_READ` each replica writes for itself, and other code that reads gets them
    combined: right for counters and metrics. `AUTO` means `ON_WRITE`. `NONE` is there for its name
    in `tf.distribute`; no variable has it.
    """

    AUTO = "auto"
    NONE = "none"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


class Policy(NamedTuple):
    """When and how the components of a variable become one."""

    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    dtype: torch.dtype
    trainable: bool


def checked_policy(
    synchronization: Any, aggregation: Any, dtype: torch.dtype, *, trainable: bool | None
) -> Policy:
    """Returns a policy of these; raises if there is none."""
    known = [s for s in VariableSynchronization if s is not VariableSynchronization.NONE]
    if not isinstance(synchronization, VariableSynchronization) or synchronization not in known:
        raise UnsupportedError(
            f"`synchronization` must be one of {_listed(known)}, got {in_words(synchronization)}."
        )
    wanted = f"one of {_listed(VariableAggregation)}"
    check_instance("aggregation", aggregation, VariableAggregation, wanted)
    if aggregation is VariableAggregation.MEAN and not _is_real(dtype):
        raise UnsupportedError(
            f"A variable of {dtype} cannot hold the mean of its replicas' values. Use a "
            f"floating-point dtype, {VariableAggregation.SUM} or "
            f"{VariableAggregation.ONLY_FIRST_REPLICA}."
        )
    if trainable is None:
        trainable = synchronization is not VariableSynchronization.ON_READ
    return Policy(synchronization, aggregation, dtype, trainable)


class HasPolicy(AnyVariable):
    """What can be asked of everything that has a policy, and what that lets be written."""

    __slots__ = ()

    _policy: Policy

    @property
    def is_on_read(self) -> bool:
        """Whether replicas write for themselves, and a read combines what they wrote."""
        return self._policy.synchronization is VariableSynchronization.ON_READ

    @property
    def synchronization(self) -> VariableSynchronization:
        """When replicas' values are combined."""
        return self._policy.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How replicas' values are combined."""
        return self._policy.aggregation

    @property
    def trainable(self) -> bool:
        """Whether it is meant to be trained; components then collect gradients if they can."""
        return self._policy.trainable

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every component."""
        return self._policy.dtype

    @property
    def _is_local(self) -> bool:
        """Whether a replica's write changes its own component only, so that they may differ."""
        return self.is_on_read or self.aggregation is VariableAggregation.NONE

    @property
    def _collects_gradients(self) -> bool:
        """Whether components require gradients: trainable, and of a dtype that can have them."""
        return self.trainable and _is_real(self.dtype)

    def _check_write(self, write: Write, *, is_on_replica: bool, is_read: bool) -> None:
        """Raises unless the policy lets a replica, or the program for all of them, do `write`."""
        exclusive = (Write.SCATTER_MIN, Write.SCATTER_MAX, Write.SCATTER_UPDATE)
        if write.is_scatter and self.is_on_read:
            raise NotImplementedError(
                f"`{write.value}()` is for ON_WRITE variables; this one is ON_READ. Assign the "
                "whole value on the replica."
            )
        if write in exclusive and self.aggregation.reduce_op is not None:
            raise NotImplementedError(
                f"`{write.value}()` cannot be used on a variable with {self.aggregation}, because "
                f"the rows of several replicas cannot be added. Use {VariableAggregation.NONE} or "
                f"{VariableAggregation.ONLY_FIRST_REPLICA}."
            )
        if self.is_on_read and not is_on_replica:
            if write is not Write.ASSIGN and self.aggregation is VariableAggregation.SUM:
                raise UnsupportedError(
                    f"`{write.value}()` outside `run` would count once per replica, because the "
                    "ON_READ variable is the SUM of its replicas. Call it on a replica, or "
                    "`assign()` the total."
                )
            if is_read:
                self._check_read(f"`{write.value}()` reads the new value, so nothing was written. ")

    def _check_read(self, why: str = "") -> None:
        """Raises if components cannot be read as one."""
        if self.is_on_read and self.aggregation is VariableAggregation.NONE:
            raise UnsupportedError(
                f"{why}An ON_READ variable with {self.aggregation} has no single value outside "
                "`run`. Give it an aggregation, read it on a replica, or pass `read_value=False`."
            )

    def _owners(self, devices: Sequence[Device]) -> tuple[int, ...]:
        if self._is_local:
            return tuple(range(len(devices)))
        memories = [this_machine().memory(device) for device in devices]
        return tuple(memories.index(memory) for memory in memories)

    def _shares(self, value: Tensor, num: int, *, is_rest_allowed: bool) -> list[Tensor]:
        """Returns what to set each of `num` components to so that the variable reads as `value`.

        The shares of a sum are equal. The rest of integers, if allowed, goes to the first replicas.
        """
        if not (self.is_on_read and self.aggregation.reduce_op is ReduceOp.SUM):
            return [value] * num
        if _is_real(self.dtype):
            return [value / num] * num
        share = torch.div(value, num, rounding_mode="floor")
        rest = value - share * num
        if rest.any() and not is_rest_allowed:
            raise UnsupportedError(
                f"An ON_READ variable of {self.dtype} that is the SUM of {num} replicas cannot "
                f"split {value.tolist()} into equal shares. Assign a multiple of {num}, or use "
                "`load()`, which gives the remainder to the first replicas."
            )
        return [share + (rest > i).to(self.dtype) for i in range(num)]

    def _check_not_sum(self, what: str, value: Any) -> None:
        """Raises if replicas' values are added, of which `value` is not one."""
        if self.aggregation.reduce_op is ReduceOp.SUM:
            raise UnsupportedError(
                f"{value!r} is the same value on all replicas, so the SUM that {what} takes of it "
                "has no meaning. Give each replica its own tensor, such as `torch.tensor(...)`, or "
                "write it outside `run`."
            )


def _is_real(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _listed(members: Iterable[enum.Enum]) -> str:
    return ", ".join(map(str, members))


def refuse_arguments(**given: Any) -> None:
    """Raises if an argument does not have its default."""
    for name, value in given.items():
        neutral, why = _NEUTRAL[name]
        if value is not neutral:
            raise UnsupportedError(f"`{name}` of a `Variable` must be {neutral}: {why}.")


def check_shape(what: str, found: torch.Size, shape: Sequence[int] | None) -> None:
    """Raises unless `found` is `shape`, or `shape` is None."""
    if shape is not None and tuple(shape) != tuple(found):
        raise UnsupportedError(
            f"{what} starts with a value of shape {tuple(found)}, but `shape` is {shape!r}. A "
            "variable has the shape of its value: leave out `shape`, or reshape the value."
        )
