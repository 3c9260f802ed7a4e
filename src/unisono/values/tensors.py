"""Taking in whatever can be read as a tensor, without a copy where that is possible."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from unisono.errors import ReplicaMismatchError


def as_tensor(value: Any) -> Tensor:
    """Reads a tensor, an array with `__dlpack__` or `__array__`, a number, or a list of numbers.

    Arrays are shared, not copied, where torch can view their memory.
    """
    if isinstance(value, Tensor):
        return value
    try:
        if hasattr(value, "__dlpack__") and _is_writeable(value):
            return from_dlpack(value)
        with warnings.catch_warnings():
            # torch warns that a read-only array could be written to; here it is only read.
            warnings.filterwarnings("ignore", message=".*not writable.*", category=UserWarning)
            return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise ReplicaMismatchError(
            f"Cannot read {value!r} of type {type(value).__name__} as a tensor: {error}. Give a "
            "tensor, a number, or anything with `__dlpack__` or `__array__`."
        ) from error


def _is_writeable(value: Any) -> bool:
    """NumPy refuses to export a read-only array, and torch cannot view negative strides."""
    flags = getattr(value, "flags", None)
    return bool(getattr(flags, "writeable", True)) and all(
        stride >= 0 for stride in getattr(value, "strides", None) or ()
    )
