"""The GPU kernel and its tables, where there is no GPU."""

from __future__ import annotations

import importlib.util
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from unisono.kernels.gpu import read_in_python
from unisono.options import ReduceOp

BLOCK = 8


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_gives_the_bits_of_the_host_in_the_interpreter() -> None:
    script = Path(__file__).with_name("interpreted.py")

    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)

    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def test_a_table_has_a_row_for_each_item_with_elements() -> None:
    batch = [[torch.ones(n), torch.ones(n)] for n in (20, 0, 8)]
    outputs = [[torch.empty(n)] for n in (20, 0, 8)]

    tables = read_in_python(ReduceOp.SUM, batch, outputs, BLOCK, "cpu")

    assert tables is not None
    (table,) = tables
    assert table[:6] == ("float32", 0, 2, 1, 2, 4)
    addresses = [[t.data_ptr() for t in (*batch[i], *outputs[i])] for i in (0, 2)]
    numbers = struct.unpack("=10q", table.rows)
    assert numbers == (0, 20, *addresses[0], 3, 8, *addresses[1])


def test_items_of_other_kinds_have_other_tables() -> None:
    batch = [
        [torch.ones(3)],
        [torch.ones(3).double()],
        [torch.ones(3), torch.ones(3)],
        [torch.ones(3, dtype=torch.complex64)],
    ]

    tables = read_in_python(ReduceOp.SUM, batch, batch, BLOCK, "cpu")

    assert tables is not None
    kinds = [(table.dtype, table.num_inputs, table.num_rows) for table in tables]
    # A complex number is two parts, and goes with what has their dtype.
    assert kinds == [("float32", 1, 2), ("float64", 1, 1), ("float32", 2, 1)]


def test_memory_that_begins_anywhere_is_not_called_aligned() -> None:
    odd = torch.ones(9)[1:]

    tables = read_in_python(ReduceOp.SUM, [[odd]], [[odd]], BLOCK, "cpu")

    assert tables is not None
    assert not tables[0].is_aligned


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(2, 3).t(),
        torch.ones(6),
        torch.ones(3, 2).double(),
        torch.ones(3, 2).to_sparse(),
        torch.ones(3, 2, device="meta"),
        torch.ones(3, 2, dtype=torch.complex64).conj().imag,
    ],
    ids=["not_contiguous", "shape", "dtype", "sparse", "device", "negative"],
)
def test_items_that_do_not_go_together_are_not_taken(other: Tensor) -> None:
    first = torch.ones(3, 2)

    assert read_in_python(ReduceOp.SUM, [[first, other]], [[first]], BLOCK, "cpu") is None
    assert read_in_python(ReduceOp.SUM, [[first]], [[other]], BLOCK, "cpu") is None


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (ReduceOp.MEAN, torch.int32),
        (ReduceOp.MAX, torch.complex64),
        (ReduceOp.SUM, torch.bool),
    ],
    ids=str,
)
def test_what_the_kernel_cannot_do_is_not_taken(op: ReduceOp, dtype: torch.dtype) -> None:
    tensor = torch.zeros(2, dtype=dtype)

    assert read_in_python(op, [[tensor]], [[tensor]], BLOCK, "cpu") is None


def test_tensors_elsewhere_are_not_taken() -> None:
    assert read_in_python(ReduceOp.SUM, [[torch.ones(1)]], [[torch.ones(1)]], BLOCK) is None
