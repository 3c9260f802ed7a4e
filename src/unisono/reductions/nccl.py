"""`NcclAllReduce`: NCCL inside one process, one GPU per replica."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.errors import CommunicationError
from unisono.kernels import divide
from unisono.options import ReduceOp
from unisono.packing import PackingRule
from unisono.reductions.all_reduce import AllReduce
from unisono.reductions.scheduled import Batch, Ends

if TYPE_CHECKING:
    from unisono.communicators import NcclGroup

_logger = logging.getLogger(__name__)


class NcclAllReduce(AllReduce):
    """All-reduces through NCCL, for values on GPUs that are all different.

    NCCL adds in its own order, so results may differ in the last bit from the other
    reductions. If NCCL cannot run (values on the CPU, replicas that share a GPU, torch without
    NCCL, an unknown dtype), the values are reduced on one device instead. The log says so once. It
    keeps its communicators for each set of GPUs until `close`.

    See `HierarchicalCopyAllReduce` for `num_packs`.
    """

    keeps_to_schedule = False

    def __init__(self, num_packs: int | PackingRule = 1) -> None:
        super().__init__(num_packs)
        self._has_said = False
        self._lock = threading.Lock()
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
                self._groups[gpus] = _nccl().NcclGroup(gpus)
            except CommunicationError as error:
                self._groups[gpus] = None
                _logger.warning("NcclAllReduce reduces on one device: %s", error)
            return self._groups[gpus]

    def _fall_back(self, why: str) -> None:
        with self._lock:
            has_said, self._has_said = self._has_said, True
        if not has_said:
            _logger.info("NcclAllReduce reduces on one device instead of through NCCL: %s.", why)


def _nccl() -> Any:
    """Returns what talks to NCCL. Values on the CPU need none of it."""
    from unisono import communicators

    return communicators


def _why_not(op: ReduceOp, pack: Sequence[Tensor]) -> str | None:
    if not all(tensor.is_cuda for tensor in pack):
        return "some values are not on GPUs"
    if len({tensor.device for tensor in pack}) < len(pack):
        return "several replicas share a GPU"
    if pack[0].is_complex() and op is ReduceOp.PROD:
        return "NCCL does not multiply complex numbers"
    if not pack[0].is_complex() and pack[0].dtype not in _nccl().NCCL_DTYPES:
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
