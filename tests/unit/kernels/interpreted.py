"""Runs the GPU kernel in Triton's interpreter, on host tensors; prints what is wrong.

Its own process: Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from unisono.kernels import gpu_sums as sums
from unisono.kernels import tree_reduce
from unisono.kernels.gpu import launch, read_in_python
from unisono.options import ReduceOp

# Not bfloat16, which the interpreter cuts off where a GPU rounds.
FLOATS = [torch.float16, torch.float32, torch.float64]
INTEGERS = [torch.int8, torch.int32, torch.int64, torch.uint8, torch.uint16]
SHAPES = [(), (0,), (3, 5), (sums.BLOCK,), (sums.BLOCK + 1,)]


def wrong(op: ReduceOp, dtype: torch.dtype, num_replicas: int) -> list[str]:
    batch = [[(torch.randn(s) * 9).to(dtype) for _ in range(num_replicas)] for s in SHAPES]
    expected = [tree_reduce(op, item) for item in batch]
    apart = [[torch.empty_like(item[0]) for _ in range(2)] for item in batch]
    failed = []
    # In place last: it changes the inputs.
    for name, outputs in (("apart", apart), ("in place", batch)):
        tables = read_in_python(op, batch, outputs, sums.BLOCK, "cpu")
        assert tables is not None
        for table in tables:
            rows = torch.frombuffer(bytearray(table.rows), dtype=torch.int64)
            launch(sums, op, table, rows)
        failed += [
            f"{op} of {num_replicas} {dtype} {tuple(total.shape)} {name}"
            for total, written in zip(expected, outputs, strict=True)
            if not all(torch.equal(one, total) for one in written)
        ]
    return failed


def main() -> None:
    torch.manual_seed(0)
    for op in ReduceOp:
        sums_only = [torch.complex64] if op in (ReduceOp.SUM, ReduceOp.MEAN) else []
        dtypes = FLOATS + sums_only + (INTEGERS if op is not ReduceOp.MEAN else [])
        counts = (1, 2, 5, 8, 17) if op is ReduceOp.SUM else (4,)
        cases = [(dtype, 3) for dtype in dtypes] + [(torch.float32, count) for count in counts]
        for dtype, num_replicas in cases:
            for failure in wrong(op, dtype, num_replicas):
                print(failure)
    print("done")


if __name__ == "__main__":
    main()
