"""The table of addresses that the kernel reads.

    row   first block, length, address of each input, address of each output

Items of one dtype, device and number of tensors share a table. The native core reads a tensor in a
twentieth of the time that Python takes, which matters for many small tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.kernels.native import native_core
from unisono.options import ReduceOp

Item = Sequence[Tensor]

_INTEGERS = frozenset(
    [
        *(torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    ]
)
_FLOATS = frozenset([torch.float16, torch.bfloat16, torch.float32, torch.float64])
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_ALIGNMENT = 16


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
    drafts: dict[tuple[torch.dtype, int, int, int], _Draft] = {}
    for item, targets in zip(batch, outputs, strict=True):
        first = item[0]
        tensors = [*item, *targets]
        dtype = _reduced_dtype(op, first.dtype)
        if dtype is None or first.device.type != device_type:
            return None
        if not all(_is_like(tensor, first) for tensor in tensors):
            return None
        length = first.numel() * (2 if first.is_complex() else 1)
        kind = (dtype, first.device.index or 0, len(item), len(targets))
        draft = drafts.setdefault(kind, _Draft())
        if length:
            draft.add(length, [tensor.data_ptr() for tensor in tensors], block)
    return [
        Table(str(dtype).removeprefix("torch."), device, num_inputs, num_outputs, *draft.done())
        for (dtype, device, num_inputs, num_outputs), draft in drafts.items()
    ]


class _Draft:
    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._num_rows = 0
        self._num_blocks = 0
        self._is_aligned = True

    def add(self, length: int, addresses: Sequence[int], block: int) -> None:
        self._numbers += [self._num_blocks, length, *addresses]
        self._num_rows += 1
        self._num_blocks += -(-length // block)
        self._is_aligned &= not any(address % _ALIGNMENT for address in addresses)

    def done(self) -> tuple[int, int, bool, bytes]:
        rows = struct.pack(f"={len(self._numbers)}q", *self._numbers)
        return self._num_rows, self._num_blocks, self._is_aligned, rows


def _reduced_dtype(op: ReduceOp, dtype: torch.dtype) -> torch.dtype | None:
    if dtype in _PARTS:
        return _PARTS[dtype] if op in (ReduceOp.SUM, ReduceOp.MEAN) else None
    if dtype in _FLOATS or (dtype in _INTEGERS and op is not ReduceOp.MEAN):
        return dtype
    return None


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
