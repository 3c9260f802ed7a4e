"""Reads anything that can be a tensor, without a copy where possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from unisono.arguments import in_words
from unisono.errors import ReplicaMismatchError
from unisono.values.tensor_like import TorchArgument


def as_tensor(value: Any) -> Tensor:
    """Reads a tensor, an array with `__dlpack__` or `__array__`, a number, or a list of numbers.

    Arrays are shared, not copied, if torch can view their memory. For a distributed value, it
    returns the component that the running code sees.
    """
    if isinstance(value, Tensor):
        return value
    try:
        if isinstance(value, TorchArgument):
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
