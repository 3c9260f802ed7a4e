"""The native core, where there is one."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from unisono._native import HostKernel


class NativeCore(NamedTuple):
    """The native kernel, or None, and in words what is used or why nothing is."""

    kernel: HostKernel | None
    status: str


@functools.cache
def native_core() -> NativeCore:
    """Loads the native core once. `UNISONO_NATIVE=0` in the environment leaves it out."""
    if os.environ.get("UNISONO_NATIVE") == "0":
        return NativeCore(None, "torch: the native core is turned off by UNISONO_NATIVE=0")
    try:
        from unisono import _native
    except ImportError as error:
        return NativeCore(None, f"torch: the native core is not installed ({error})")
    try:
        kernel = _native.HostKernel(torch.Tensor)
    except RuntimeError as error:
        return NativeCore(None, f"torch: the native core does not fit torch ({error})")
    return NativeCore(kernel, f"native, {_native.instruction_set()}")
