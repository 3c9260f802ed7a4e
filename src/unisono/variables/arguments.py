"""Refuses arguments of `tf.Variable` that a `Variable` does not support, and wrong shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from unisono.errors import UnsupportedError

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
