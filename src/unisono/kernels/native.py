"""Loads the native core, if there is one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from unisono._native import Bell, GpuReader, HostKernel


class NativeCore(NamedTuple):
    """The native core, if it is there, and a text that says what is used, or why it is not."""

    status: str
    kernel: HostKernel | None = None
    bell: type[Bell] | None = None
    gpu_reader: GpuReader | None = None
    hold_same: Callable[[list[Any], bytes, bytes], bool] | None = None


@functools.cache
def native_core() -> NativeCore:
    """Loads the native core once. `UNISONO_NATIVE=0` in the environment leaves it out."""
    if os.environ.get("UNISONO_NATIVE") == "0":
        return NativeCore("torch: UNISONO_NATIVE=0 turns the native core off")
    try:
        import unisono._native as _native
    except ModuleNotFoundError:
        return NativeCore("torch: Unisono was installed without the native core")
    except ImportError as error:
        return NativeCore(f"torch: the native core cannot be loaded ({error})")
    try:
        kernel = _native.HostKernel(torch.Tensor)
        reader = _native.GpuReader(torch.Tensor)
    except RuntimeError as error:
        return NativeCore(f"torch: the native core does not fit torch ({error})")
    return NativeCore(
        f"native, {_native.instruction_set()}", kernel, _native.Bell, reader, _native.hold_same
    )
