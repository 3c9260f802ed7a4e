"""NCCL for the GPUs of this process, which may be some of those of a job.

It calls the library that torch has loaded, through ctypes. `torch.cuda.nccl` keeps every
communicator until the process ends. A process group of torch has one GPU per process, and connects
without a deadline. CuPy or nccl4py would load a second NCCL, and other CUDA libraries than torch's.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from unisono.errors import CommunicationError
from unisono.options import ReduceOp
from unisono.torch_private import raw_stream

# The numbers of nccl.h.
DTYPES = {
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
_IN_PROGRESS = 7
ID_BYTES = 128
_MAGIC = 0xCAFEBEEF
# The version that introduced what `_Config` holds; newer libraries read it, too.
_CONFIG_VERSION = 21400
# Graphs that hold work of a communicator keep it from ending.
_END_SECONDS = 10.0

# Two threads that start work on the same GPUs in different orders would deadlock.
_launch_lock = threading.Lock()


class _Id(ctypes.Structure):
    _fields_ = [("content", ctypes.c_char * ID_BYTES)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    ]


def new_id() -> bytes:
    """Returns what the processes of a group know each other by; one of them makes it."""
    made = _Id()
    _check(_library().ncclGetUniqueId(ctypes.byref(made)), "make the name of a group")
    return bytes(made)


class NcclGroup:
    """The GPUs of this process in a group of GPUs, which are all different.

    Args:
        gpus: The numbers of the GPUs of this process.
        group_id: The same on all processes of the group, by `new_id`; not given if there is one.
        first: How many GPUs of the group come before these.
        size: How many GPUs the group has, if there are several processes.
        look: Called while this waits for other processes; may raise to end that.
    """

    def __init__(
        self,
        gpus: Sequence[int],
        group_id: bytes = b"",
        *,
        first: int = 0,
        size: int = 0,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        try:
            library = _library()
        except OSError as error:
            raise CommunicationError(
                f"The NCCL library cannot be loaded ({error}). Use `HierarchicalCopyAllReduce`, "
                "which needs no NCCL."
            ) from error
        self._look = look
        are_many = bool(group_id)
        what = f"connect the GPUs {', '.join(map(str, gpus))}"
        if max(gpus) >= torch.cuda.device_count():
            # NCCL would wait for the one that is missing.
            raise CommunicationError(
                f"NCCL could not {what}: this process sees {torch.cuda.device_count()}. Name GPUs "
                "that torch sees."
            )
        name = _Id.from_buffer_copy(group_id or new_id())
        # Otherwise nobody could end the wait for a process that is gone.
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, not are_many)
        made = (ctypes.c_void_p * len(gpus))()
        self._thread: threading.Thread | None = None
        try:
            with _launched_together(what):
                for i, gpu in enumerate(gpus):
                    with torch.cuda.device(gpu):
                        code = library.ncclCommInitRankConfig(
                            ctypes.byref(made, i * ctypes.sizeof(ctypes.c_void_p)),
                            size or len(gpus),
                            name,
                            first + i,
                            ctypes.byref(config),
                        )
                    _check(code, what)
            self._communicators = dict(zip(gpus, list(made), strict=True))
            self._settle(what)
        except BaseException:
            _abort_aside([one for one in made if one]).join(_END_SECONDS)
            raise
        end = _abort_aside if are_many else _destroy
        self._end = weakref.finalize(self, end, list(made))
        self._end.atexit = False

    def all_reduce(self, op: ReduceOp, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Combines contiguous tensors, one per GPU, on the current streams. It has no mean."""
        start = _library().ncclAllReduce
        self._start("start an all-reduce", start, inputs, outputs, _OPS[op])

    def broadcast(self, data: Tensor, root: int) -> None:
        """Overwrites contiguous bytes on the one GPU of this process with those of `root`."""
        self._start("start a broadcast", _library().ncclBroadcast, [data], [data], root)

    def _start(
        self,
        what: str,
        start: Callable[..., int],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        number: int,
    ) -> None:
        with _launched_together(what):
            for given, output in zip(inputs, outputs, strict=True):
                gpu = given.device.index
                code = start(
                    given.data_ptr(),
                    output.data_ptr(),
                    given.numel(),
                    DTYPES[given.dtype],
                    number,
                    self._communicators[gpu],
                    raw_stream(gpu),
                )
                _check(code, f"{what} on GPU {gpu}")
        self._settle(what)

    def check(self) -> None:
        """Raises a `CommunicationError` if NCCL has noticed that another process is gone."""
        for one in self._communicators.values():
            _check(_state_of(one), "go on")

    def abort(self) -> None:
        """Stops what GPUs do here with others. What they have written by then is garbage."""
        if self._end.detach():
            self._thread = _abort_aside(list(self._communicators.values()))

    def close(self) -> None:
        """Ends. May be called twice. CUDA graphs with work of this group must be freed before."""
        self._thread = self._end() or self._thread
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def _settle(self, what: str) -> None:
        """Waits until calls have been started, in which NCCL may have to connect to others."""
        for one in self._communicators.values():
            while (state := _state_of(one)) == _IN_PROGRESS:
                self._look()
            _check(state, what)


@functools.cache
def _library() -> ctypes.CDLL:
    """The NCCL that torch has loaded; raises OSError if there is none."""
    library = ctypes.CDLL("libnccl.so.2")
    library.ncclGetErrorString.restype = ctypes.c_char_p
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    library.ncclBroadcast.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
    library.ncclCommInitRankConfig.argtypes = [pointer, number, _Id, number, pointer]
    library.ncclCommGetAsyncError.argtypes = [pointer, pointer]
    library.ncclCommDestroy.argtypes = library.ncclCommAbort.argtypes = [pointer]
    return library


def _state_of(communicator: int) -> int:
    state = ctypes.c_int()
    _check(_library().ncclCommGetAsyncError(communicator, ctypes.byref(state)), "tell its state")
    return state.value


def _check(code: int, what: str) -> None:
    if code not in (0, _IN_PROGRESS):
        text = _library().ncclGetErrorString(code).decode()
        raise CommunicationError(
            f"NCCL could not {what}: {text}. Set NCCL_DEBUG=INFO to see why, or use "
            "`HierarchicalCopyAllReduce`, which needs no NCCL."
        )


@contextmanager
def _launched_together(what: str) -> Iterator[None]:
    library = _library()
    with _launch_lock:
        _check(library.ncclGroupStart(), "begin a group of calls")
        try:
            yield
        finally:
            code = library.ncclGroupEnd()
    _check(code, what)


def _destroy(communicators: Sequence[int]) -> None:
    with _launch_lock:
        for one in communicators:
            _library().ncclCommDestroy(one)


def _abort_aside(communicators: Sequence[int]) -> threading.Thread:
    """Aborts communicators in a thread: this waits for CUDA graphs that hold work of theirs."""

    def abort() -> None:
        for one in communicators:
            _library().ncclCommAbort(one)

    thread = threading.Thread(target=abort, name="unisono-nccl-abort", daemon=True)
    thread.start()
    return thread
