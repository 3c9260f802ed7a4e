"""What torch.distributed calls our operations."""

from __future__ import annotations

from typing import Any

from torch import distributed

from unisono.options import ReduceOp

_OWN: dict[Any, ReduceOp] = {
    distributed.ReduceOp.SUM: ReduceOp.SUM,
    distributed.ReduceOp.AVG: ReduceOp.MEAN,
    distributed.ReduceOp.MIN: ReduceOp.MIN,
    distributed.ReduceOp.MAX: ReduceOp.MAX,
    distributed.ReduceOp.PRODUCT: ReduceOp.PROD,
}


def own_op(op: Any) -> ReduceOp | None:
    """Returns our name for an operation of torch.distributed, if we have it."""
    return _OWN.get(getattr(op, "op", op))
