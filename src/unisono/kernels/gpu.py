"""Batches of reductions inside the memory of a GPU, each batch in one launch of a kernel.

The kernel reads a table of addresses:

    row   first block, length, address of each input, address of each output

Items of one dtype, device and number of tensors share a table. The native core reads a tensor in a
twentieth of the time that Python takes, which matters for many small tensors.
"""

from __future__ import annotations

import itertools
import logging
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.kernels.checks import REAL_DTYPES
from unisono.kernels.native import native_core
from unisono.kernels.tree import wide_dtype
from unisono.options import ReduceOp
from unisono.sharing import computed_once
from unisono.torch_private import raw_stream

Item = Sequence[Tensor]

_OPERATIONS = {
    ReduceOp.SUM: 0,
    ReduceOp.MEAN: 0,
    ReduceOp.PROD: 1,
    ReduceOp.MIN: 2,
    ReduceOp.MAX: 3,
}
_NUM_WARPS = 8

_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_ALIGNMENT = 16

# The tables used last, oldest first, by device, stream and content. Another stream could read a
# table before it has arrived.
_MAX_TABLES = 256
_tables: dict[tuple[int, int, bytes], Tensor] = {}
_tables_lock = threading.Lock()

_logger = logging.getLogger(__name__)


class Triton(NamedTuple):
    """The kernels, if Triton works, and a text that says what is used, or why nothing is."""

    status: str
    sums: ModuleType | None = None


@computed_once
def triton_status() -> Triton:
    """Loads the kernels once. `UNISONO_TRITON=0` in the environment leaves them out."""
    if os.environ.get("UNISONO_TRITON") == "0":
        return Triton("torch: Triton is turned off by UNISONO_TRITON=0")
    try:
        from unisono.kernels import gpu_sums as sums
    except ImportError as error:
        return Triton(f"torch: Triton is not installed ({error})")
    try:
        _try_out(sums)
    except Exception as error:
        # Most likely there is no C compiler, which Triton needs.
        _logger.warning("Sums on GPUs go through torch, since Triton does not work here: %s", error)
        return Triton(f"torch: Triton does not work here ({error})")
    return Triton(f"Triton {metadata.version('triton')}", sums)


def reduce_on_gpu(op: ReduceOp, batch: Sequence[Item], outputs: Sequence[Item]) -> bool:
    """Writes the result of each item into its outputs, which may be inputs.

    Returns False, with nothing written, if an item is not supported, if there is no Triton, or
    while a CUDA graph without an arena is captured: its replays would read a freed table.
    """
    is_capturing = torch.cuda.is_current_stream_capturing()
    arena = _arenas[-1] if is_capturing and _arenas else None
    if is_capturing and arena is None:
        return False
    sums = triton_status().sums
    if sums is None:
        return False
    tables = read_tables(op, batch, outputs, sums.BLOCK)
    if tables is None or any(table.num_inputs > sums.MAX_REPLICAS for table in tables):
        return False
    if arena is not None and not arena.has_room_for(tables):
        return False
    for table in tables:
        if table.num_rows:
            device = torch.device("cuda", table.device)
            with torch.cuda.device(device):
                rows = _sent(table.rows, device) if arena is None else arena.put(table.rows, device)
                launch(sums, op, table, rows)
    return True


class TableArena:
    """Pinned memory for the tables of a captured step, which its replays copy from."""

    # Enough for the gradients of thousands of parameters on eight replicas.
    _NUM_BYTES = 8 << 20

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._room = torch.empty(self._NUM_BYTES // 8, dtype=torch.int64, pin_memory=True)
        self._num_used = 0

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within the block, sums that are captured put their tables here."""
        _arenas.append(self)
        try:
            yield
        finally:
            _arenas.remove(self)

    def has_room_for(self, tables: Sequence[Table]) -> bool:
        """Whether the tables fit in."""
        return self._num_used + sum(len(table.rows) // 8 for table in tables) <= len(self._room)

    def put(self, rows: bytes, device: torch.device) -> Tensor:
        """Returns the rows on the device, in every replay."""
        content = torch.frombuffer(bytearray(rows), dtype=torch.int64)
        with self._lock:
            start, self._num_used = self._num_used, self._num_used + len(content)
        pinned = self._room[start : start + len(content)]
        pinned.copy_(content)
        return pinned.to(device, non_blocking=True)


# The arenas of the steps that are being captured.
_arenas: list[TableArena] = []


def _try_out(sums: Any) -> None:
    tensor = torch.zeros(1, device="cuda")
    tables = read_in_python(ReduceOp.SUM, [[tensor, tensor]], [[tensor]], sums.BLOCK)
    assert tables is not None
    launch(sums, ReduceOp.SUM, tables[0], _sent(tables[0].rows, tensor.device))


def launch(sums: Any, op: ReduceOp, table: Table, rows: Tensor) -> None:
    """Launches the kernel on a table whose rows are on its device."""
    dtype: torch.dtype = getattr(torch, table.dtype)
    sums.reduce_table[(table.num_blocks,)](
        rows,
        table.num_rows,
        table.num_inputs,
        NUM_INPUTS=table.num_inputs,
        NUM_OUTPUTS=table.num_outputs,
        DTYPE=getattr(sums.tl, table.dtype),
        WIDE=getattr(sums.tl, str(wide_dtype(dtype)).removeprefix("torch.")),
        OP=_OPERATIONS.get(op, 0),
        IS_MEAN=op is ReduceOp.MEAN,
        IS_ALIGNED=table.is_aligned,
        BLOCK_SIZE=sums.BLOCK,
        num_warps=_NUM_WARPS,
    )


def _sent(rows: bytes, device: torch.device) -> Tensor:
    """Returns the rows on the device, which most steps share with the step before."""
    key = device.index, raw_stream(device.index), rows
    with _tables_lock:
        table = _tables.pop(key, None)
        if table is None:
            # From pinned memory, so that the host does not wait. torch keeps it until the copy is
            # done.
            pinned = torch.frombuffer(bytearray(rows), dtype=torch.int64).pin_memory()
            table = pinned.to(device, non_blocking=True)
        _tables[key] = table
        if len(_tables) > _MAX_TABLES:
            del _tables[next(iter(_tables))]
    return table


class Table(NamedTuple):
    """The items of one launch."""

    dtype: str
    device: int
    num_inputs: int
    num_outputs: int
    num_rows: int
    num_blocks: int
    is_aligned: bool
    rows: bytes


def read_tables(
    op: ReduceOp, batch: Sequence[Item], outputs: Sequence[Item], block: int
) -> list[Table] | None:
    """Returns the tables of a batch in GPU memory, or None if an item is not supported.

    Supported are contiguous tensors of one shape and dtype on one GPU, but not a mean of integers,
    whose outputs have another dtype.
    """
    reader = native_core().gpu_reader
    if reader is None:
        return read_in_python(op, batch, outputs, block)
    is_mean = op is ReduceOp.MEAN
    tables = reader.tables("sum" if is_mean else op.value, batch, outputs, is_mean, block)
    return None if tables is None else [Table(*table) for table in tables]


def read_in_python(
    op: ReduceOp,
    batch: Sequence[Item],
    outputs: Sequence[Item],
    block: int,
    device_type: str = "cuda",
) -> list[Table] | None:
    """Reads the same in Python, without the native core."""
    found: dict[tuple[torch.dtype, int, int, int], list[tuple[int, list[int]]]] = {}
    for item, targets in zip(batch, outputs, strict=True):
        first = item[0]
        tensors = [*item, *targets]
        dtype = _reduced_dtype(op, first.dtype)
        if dtype is None or first.device.type != device_type:
            return None
        if not all(_is_like(tensor, first) for tensor in tensors):
            return None
        length = first.numel() * (2 if first.is_complex() else 1)
        own = found.setdefault((dtype, first.device.index or 0, len(item), len(targets)), [])
        if length:
            own.append((length, [tensor.data_ptr() for tensor in tensors]))
    tables = []
    for (dtype, device, num_inputs, num_outputs), own in found.items():
        *starts, num_blocks = itertools.accumulate((-(-n // block) for n, _ in own), initial=0)
        rows = [[start, n, *at] for start, (n, at) in zip(starts, own, strict=True)]
        numbers = list(itertools.chain(*rows))
        is_aligned = not any(one % _ALIGNMENT for _, at in own for one in at)
        data = struct.pack(f"={len(numbers)}q", *numbers)
        kind = str(dtype).removeprefix("torch."), device, num_inputs, num_outputs
        tables.append(Table(*kind, len(own), num_blocks, is_aligned, data))
    return tables


def _reduced_dtype(op: ReduceOp, dtype: torch.dtype) -> torch.dtype | None:
    if dtype in _PARTS:
        return _PARTS[dtype] if op in (ReduceOp.SUM, ReduceOp.MEAN) else None
    is_known = dtype in REAL_DTYPES and (dtype.is_floating_point or op is not ReduceOp.MEAN)
    return dtype if is_known else None


def _is_like(tensor: Tensor, first: Tensor) -> bool:
    return (
        tensor.dtype == first.dtype
        and tensor.device == first.device
        and tensor.layout is torch.strided
        and tensor.shape == first.shape
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    )
