"""What the update of an optimizer depends on, beside the values of tensors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, optim

from unisono.variables.attributes import Contents
from unisono.variables.front import plain_class
from unisono.variables.leaves import Leaves
from unisono.variables.shares import has_hooks


class Settings:
    """The hyperparameters of an optimizer, and the tensors that it works on, as they are now."""

    def __init__(self, optimizer: Any, owners: Sequence[Leaves] = ()) -> None:
        self._optimizer = optimizer
        self._owners = owners
        self._constants, self._tensors = _read(optimizer)
        self._contents = Contents()
        self._note()

    @property
    def can_be_captured(self) -> bool:
        """Whether all that an update does is done by GPUs.

        Before it, gradients that replicas have written themselves are compared and exchanged.
        """
        if any(one.has_own_gradients() for one in self._owners):
            return False
        groups = vars(self._optimizer)["param_groups"]
        is_on_gpus = all(tensor.is_cuda for tensor in self._tensors)
        is_without_host = plain_class(type(self._optimizer)) is optim.SGD or all(
            group.get("capturable") for group in groups
        )
        return is_on_gpus and is_without_host and not has_hooks(self._optimizer)

    def renewed(self) -> Settings:
        """Returns those of now."""
        return Settings(self._optimizer)

    def are_current(self) -> bool:
        """Whether they are still the same."""
        is_held = all(map(operator.is_, _tables(self._optimizer), self._held))
        if is_held and self._contents.are_same():
            # The very same objects, which is quickly seen.
            return True
        constants, tensors = _read(self._optimizer)
        are_same = (
            constants == self._constants
            and len(tensors) == len(self._tensors)
            and all(map(operator.is_, tensors, self._tensors))
        )
        if are_same:
            self._note()
        return are_same

    def _note(self) -> None:
        self._held = groups, state = _tables(self._optimizer)
        self._contents.note(
            [
                groups,
                *(group["params"] for group in groups),
                *groups,
                state,
                *state.values(),
            ]
        )


def _tables(optimizer: Any) -> tuple[list[dict[str, Any]], dict[Tensor, dict[str, Any]]]:
    attributes = vars(optimizer)
    return attributes["param_groups"], attributes["state"]


def _read(optimizer: Any) -> tuple[list[Any], list[Tensor]]:
    constants: list[Any] = []
    tensors: list[Tensor] = []
    for group in vars(optimizer)["param_groups"]:
        tensors += group["params"]
        for name, value in group.items():
            if isinstance(value, Tensor):
                tensors.append(value)
            elif name != "params":
                constants.append((name, value))
    for state in vars(optimizer)["state"].values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return constants, tensors
