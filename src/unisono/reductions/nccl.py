"""`NcclAllReduce`: NCCL inside one process, one GPU per replica.

`torch.cuda.nccl` keeps every communicator until the process ends. So `NcclGroup` calls a few
functions of the library that torch has loaded through ctypes. CuPy or nccl4py would load a second
NCCL, and other CUDA libraries than torch's.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from unisono.errors import CommunicationError
from unisono.kernels import divide
from unisono.options import ReduceOp
from unisono.packing import PackingRule
from unisono.reductions.all_reduce import AllReduce
from unisono.reductions.scheduled import Batch, Ends
from unisono.torch_private import raw_stream

_logger = logging.getLogger(__name__)


class NcclAllReduce(AllReduce):
    """All-reduces through NCCL, for values on GPUs that are all different.

    NCCL adds in its own order, so results may differ in the last bit from the other
    reductions. If NCCL cannot run (values on the CPU, replicas that share a GPU, torch without
    NCCL, an unknown dtype), the values are reduced on one device instead. The log says so once. It
    keeps its communicators for each set of GPUs until `close`.

    Args:
        num_packs: How many packs to split a batch into; 0 reduces each value alone. Or a rule of
            `unisono.packing`.
    """

    def __init__(self, num_packs: int | PackingRule = 1) -> None:
        super().__init__(num_packs)
        self._has_said = False
        # By GPUs; None if NCCL could not connect them.
        self._groups: dict[tuple[int, ...], NcclGroup | None] = {}

    def reduce_plain(
        self, op: ReduceOp, batch: Sequence[tuple[object, ...]], ends: Ends
    ) -> list[tuple[Tensor, ...] | None]:
        places = self.route(ends).places
        if any(place.type != "cuda" for place in places):
            self._fall_back(f"the values are on {', '.join(map(str, ends.sources))}")
        return super().reduce_plain(op, batch, ends)

    def reduce_packs(self, op: ReduceOp, packs: Batch, ends: Ends) -> list[tuple[Tensor, ...]]:
        why_not = next((why for pack in packs if (why := _why_not(op, pack))), None)
        group = None if why_not else self._group(tuple(one.device.index for one in packs[0]))
        if group is None:
            self._fall_back(why_not or "NCCL has failed")
            return super().reduce_packs(op, packs, ends)
        order = [ends.sources.index(device) for device in ends.destinations]
        totals = [_all_reduce(group, op, pack) for pack in packs]
        return [tuple(total[i] for i in order) for total in totals]

    def close(self) -> None:
        with self._lock:
            groups, self._groups = self._groups, {}
        for group in groups.values():
            if group is not None:
                group.close()

    def _group(self, gpus: tuple[int, ...]) -> NcclGroup | None:
        """Returns the communicators of these GPUs, or None if NCCL cannot make them."""
        with self._lock:
            if gpus in self._groups:
                return self._groups[gpus]
            try:
                self._groups[gpus] = NcclGroup(gpus)
            except CommunicationError as error:
                self._groups[gpus] = None
                _logger.warning("NcclAllReduce reduces on one device: %s", error)
            return self._groups[gpus]

    def _fall_back(self, why: str) -> None:
        with self._lock:
            has_said, self._has_said = self._has_said, True
        if not has_said:
            _logger.info("NcclAllReduce reduces on one device instead of through NCCL: %s.", why)


def _why_not(op: ReduceOp, pack: Sequence[Tensor]) -> str | None:
    if not all(tensor.is_cuda for tensor in pack):
        return "some values are not on GPUs"
    if len({tensor.device for tensor in pack}) < len(pack):
        return "several replicas share a GPU"
    if pack[0].is_complex() and op is ReduceOp.PROD:
        return "NCCL does not multiply complex numbers"
    if not pack[0].is_complex() and pack[0].dtype not in _DTYPES:
        return f"NCCL does not know {pack[0].dtype}"
    return None


def _all_reduce(group: NcclGroup, op: ReduceOp, pack: Sequence[Tensor]) -> list[Tensor]:
    dtype = pack[0].dtype
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in pack]
    inputs = [part.detach().contiguous() for part in parts]
    totals = [torch.empty_like(part) for part in inputs]
    group.all_reduce(op, inputs, totals)
    if dtype.is_complex:
        totals = [torch.view_as_complex(total) for total in totals]
    if op is not ReduceOp.MEAN:
        return totals
    return [divide(total, len(pack), dtype) for total in totals]


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
