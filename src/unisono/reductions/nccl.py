"""`NcclAllReduce`: NCCL inside one process, one GPU a replica."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.cuda import nccl

from unisono.kernels import divide
from unisono.options import ReduceOp
from unisono.packing import PackingRule
from unisono.reductions.all_reduce import AllReduce
from unisono.reductions.scheduled import Ends

_logger = logging.getLogger(__name__)

# The numbers that `torch.cuda.nccl` takes for its operations.
_NCCL_OPS = {
    ReduceOp.SUM: 0,
    ReduceOp.MEAN: 0,
    ReduceOp.PROD: 1,
    ReduceOp.MAX: 2,
    ReduceOp.MIN: 3,
}

# NCCL allows one thread at a time to start work on the devices of a process.
_launch_lock = threading.Lock()


class NcclAllReduce(AllReduce):
    """All-reduces through NCCL, for values on GPUs that are all different.

    NCCL adds in an order of its own, so results may differ in the last bit from the other
    reductions. Where NCCL cannot run (values on the CPU, replicas that share a GPU, a torch
    without NCCL, a dtype it does not know), the values meet on one device instead; the log says so
    once.

    Args:
        num_packs: How many packs the values of a batch are cut into; 0 reduces each on its own.
            Or a rule of `unisono.packing`.
    """

    def __init__(self, num_packs: int | PackingRule = 1) -> None:
        super().__init__(num_packs)
        self._has_said = False

    def reduce_plain(
        self, op: ReduceOp, batch: Sequence[tuple[object, ...]], ends: Ends
    ) -> list[tuple[Tensor, ...] | None]:
        """See `ScheduledOps.reduce_plain`."""
        places = self.route(ends).places
        if any(place.type != "cuda" for place in places):
            self._fall_back(f"the values are on {', '.join(map(str, ends.sources))}")
        return super().reduce_plain(op, batch, ends)

    def reduce_packs(
        self, op: ReduceOp, packs: Sequence[tuple[Tensor, ...]], ends: Ends
    ) -> list[tuple[Tensor, ...]]:
        """See `AllReduce.reduce_packs`."""
        why_not = next((why for pack in packs if (why := _why_not(op, pack))), None)
        if why_not is not None:
            self._fall_back(why_not)
            return super().reduce_packs(op, packs, ends)
        order = [ends.sources.index(device) for device in ends.destinations]
        return [tuple(_all_reduce(op, pack)[i] for i in order) for pack in packs]

    def _fall_back(self, why: str) -> None:
        with self._lock:
            has_said, self._has_said = self._has_said, True
        if not has_said:
            _logger.info("NcclAllReduce reduces on one device instead of through NCCL: %s.", why)


def _why_not(op: ReduceOp, pack: Sequence[Tensor]) -> str | None:
    if len({tensor.device for tensor in pack}) < len(pack):
        return "several replicas share a GPU"
    if not nccl.is_available(pack):
        return "this torch has no NCCL"
    if pack[0].is_complex() and op is ReduceOp.PROD:
        return "NCCL does not multiply complex numbers"
    return None


def _all_reduce(op: ReduceOp, pack: Sequence[Tensor]) -> list[Tensor]:
    dtype = pack[0].dtype
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in pack]
    totals = [torch.empty_like(part) for part in parts]
    with _launch_lock:
        nccl.all_reduce([part.contiguous() for part in parts], totals, op=_NCCL_OPS[op])
    if dtype.is_complex:
        totals = [torch.view_as_complex(total) for total in totals]
    if op is not ReduceOp.MEAN:
        return totals
    return [divide(total, len(pack), dtype) for total in totals]
