"""The tree of sums as one kernel over a table of addresses, in Triton.

A table has one row per item: its first block, its length, and the addresses of its inputs and
outputs. Every program of a launch combines one block of one item: it finds the item, combines the
replicas' elements in the order of `unisono.kernels.tree`, and writes every output.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 2048
# The number of inputs for which the levels of the tree are written out below.
MAX_REPLICAS = 31

SUM, PROD, MIN, MAX = (tl.constexpr(i) for i in range(4))


@triton.jit
def _combine(a, b, OP: tl.constexpr):
    if OP == SUM:
        return a + b
    elif OP == PROD:  # noqa: RET505 - the compiler drops the branches that do not apply
        return a * b
    elif OP == MIN:
        return tl.where((b < a) | (b != b), b, a)
    else:
        return tl.where((b > a) | (b != b), b, a)


@triton.jit
def _find_row(table, program, num_rows, ROW: tl.constexpr):
    """Returns the last row whose first block is not after `program`."""
    low = num_rows * 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(table + middle * ROW) <= program
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return table + low * ROW


@triton.jit
def _address(row, i, DTYPE: tl.constexpr, IS_ALIGNED: tl.constexpr):
    address = tl.load(row + 2 + i).to(tl.pointer_type(DTYPE))
    if IS_ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@triton.jit
def _reduce_block(
    row,
    start,
    left,
    divisor,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    OP: tl.constexpr,
    IS_MEAN: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    lanes = tl.arange(0, BLOCK_SIZE)
    # A binary counter: a sum of 1, 2, 4, 8 or 16 neighbors waits for another of its size.
    for i in tl.static_range(NUM_INPUTS):
        source = _address(row, i, DTYPE, IS_ALIGNED) + start
        if IS_WHOLE:
            value = tl.load(source + lanes).to(WIDE)
        else:
            value = tl.load(source + lanes, mask=lanes < left, other=0).to(WIDE)
        if i % 2 == 0:
            of_1 = value
        else:
            value = _combine(of_1, value, OP)
            if (i // 2) % 2 == 0:
                of_2 = value
            else:
                value = _combine(of_2, value, OP)
                if (i // 4) % 2 == 0:
                    of_4 = value
                else:
                    value = _combine(of_4, value, OP)
                    if (i // 8) % 2 == 0:
                        of_8 = value
                    else:
                        of_16 = _combine(of_8, value, OP)
    # A sum without a neighbor moves up unchanged.
    if NUM_INPUTS % 2 == 1:
        total = of_1
    if (NUM_INPUTS // 2) % 2 == 1:
        total = of_2 if NUM_INPUTS % 2 == 0 else _combine(of_2, total, OP)
    if (NUM_INPUTS // 4) % 2 == 1:
        total = of_4 if NUM_INPUTS % 4 == 0 else _combine(of_4, total, OP)
    if (NUM_INPUTS // 8) % 2 == 1:
        total = of_8 if NUM_INPUTS % 8 == 0 else _combine(of_8, total, OP)
    if NUM_INPUTS // 16 == 1:
        total = of_16 if NUM_INPUTS % 16 == 0 else _combine(of_16, total, OP)
    if IS_MEAN:
        # A true division: by itself Triton divides float32 with an error of two units.
        if WIDE == tl.float32:  # noqa: SIM300
            total = tl.div_rn(total, divisor.to(tl.float32))
        else:
            total = total / divisor.to(WIDE)
    for i in tl.static_range(NUM_OUTPUTS):
        target = _address(row, NUM_INPUTS + i, DTYPE, IS_ALIGNED) + start
        if IS_WHOLE:
            tl.store(target + lanes, total.to(DTYPE))
        else:
            tl.store(target + lanes, total.to(DTYPE), mask=lanes < left)


@triton.jit(do_not_specialize=["num_rows", "divisor"])
def reduce_table(
    table,
    num_rows,
    divisor,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    OP: tl.constexpr,
    IS_MEAN: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Reduces one block of one item; a mean divides by `divisor`."""
    program = tl.program_id(0).to(tl.int64)
    row = _find_row(table, program, num_rows, 2 + NUM_INPUTS + NUM_OUTPUTS)
    start = (program - tl.load(row)) * BLOCK_SIZE
    left = tl.load(row + 1) - start
    if left >= BLOCK_SIZE:
        _reduce_block(
            row, start, left, divisor, NUM_INPUTS, NUM_OUTPUTS, DTYPE, WIDE, OP, IS_MEAN,
            IS_ALIGNED, BLOCK_SIZE, IS_WHOLE=True,
        )  # fmt: skip
    else:
        _reduce_block(
            row, start, left, divisor, NUM_INPUTS, NUM_OUTPUTS, DTYPE, WIDE, OP, IS_MEAN,
            IS_ALIGNED, BLOCK_SIZE, IS_WHOLE=False,
        )  # fmt: skip
