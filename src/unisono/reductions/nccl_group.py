"""NCCL between GPUs of one process: makes and destroys the communicators of a set of GPUs.

`torch.cuda.nccl` keeps every communicator until the process ends. So this calls a few functions of
the library that torch has loaded through ctypes. CuPy or nccl4py would load a second NCCL, and
other CUDA libraries than torch's.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from unisono.errors import CommunicationError
from unisono.options import ReduceOp
from unisono.torch_private import raw_stream

# The numbers of nccl.h.
_DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
_OPS = {ReduceOp.SUM: 0, ReduceOp.MEAN: 0, ReduceOp.PROD: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}

# Two threads that start work on the same GPUs in different orders would deadlock.
_launch_lock = threading.Lock()


def nccl_takes(dtype: torch.dtype) -> bool:
    """Whether NCCL has a number for `dtype`."""
    return dtype in _DTYPES


@functools.cache
def _library() -> ctypes.CDLL:
    """The NCCL that torch has loaded; raises OSError if there is none."""
    library = ctypes.CDLL("libnccl.so.2")
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclAllReduce.argtypes = [
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
        *(ctypes.c_void_p, ctypes.c_void_p),
    ]
    library.ncclCommDestroy.argtypes = [ctypes.c_void_p]
    return library


def _check(code: int, what: str) -> None:
    if code:
        text = _library().ncclGetErrorString(code).decode()
        raise CommunicationError(
            f"NCCL could not {what}: {text}. Set NCCL_DEBUG=INFO to see why, or use "
            "`HierarchicalCopyAllReduce`, which needs no NCCL."
        )


class NcclGroup:
    """The communicators of some GPUs of this process, all different."""

    def __init__(self, gpus: Sequence[int]) -> None:
        try:
            library = _library()
        except OSError as error:
            raise CommunicationError(
                f"The NCCL library cannot be loaded ({error}). Use `HierarchicalCopyAllReduce`, "
                "which needs no NCCL."
            ) from error
        made = (ctypes.c_void_p * len(gpus))()
        with _launch_lock, torch.cuda.device(gpus[0]):
            code = library.ncclCommInitAll(made, len(gpus), (ctypes.c_int * len(gpus))(*gpus))
        _check(code, f"connect the GPUs {', '.join(map(str, gpus))}")
        self._communicators = dict(zip(gpus, list(made), strict=True))
        self._end = weakref.finalize(self, _destroy, list(made))
        self._end.atexit = False

    def all_reduce(self, op: ReduceOp, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Combines contiguous tensors, one per GPU, on the current streams. It has no mean."""
        library = _library()
        with _launched_together():
            for given, output in zip(inputs, outputs, strict=True):
                gpu = given.device.index
                code = library.ncclAllReduce(
                    given.data_ptr(),
                    output.data_ptr(),
                    given.numel(),
                    _DTYPES[given.dtype],
                    _OPS[op],
                    self._communicators[gpu],
                    raw_stream(gpu),
                )
                _check(code, f"start an all-reduce on GPU {gpu}")

    def close(self) -> None:
        """Destroys the communicators. May be called twice."""
        self._end()


@contextmanager
def _launched_together() -> Iterator[None]:
    library = _library()
    with _launch_lock:
        _check(library.ncclGroupStart(), "begin a group of calls")
        try:
            yield
        finally:
            code = library.ncclGroupEnd()
    _check(code, "start a group of calls")


def _destroy(communicators: Sequence[int]) -> None:
    with _launch_lock:
        for one in communicators:
            _library().ncclCommDestroy(one)
