"""Which reduction suits which devices, and why."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed

from unisono.devices import Device, DeviceLike, resolve, this_machine
from unisono.packing import BYTES_PER_PACK, Line
from unisono.reductions.cross_device_ops import CrossDeviceOps
from unisono.reductions.scheduled import Ends, Prices, ReductionToOneDevice, ScheduledOps

_logger = logging.getLogger(__name__)


class Choice(NamedTuple):
    """A reduction, and the reason in words."""

    ops: ScheduledOps
    reason: str


def select_cross_device_ops(
    devices: Sequence[DeviceLike], tuning: Prices | None = None
) -> CrossDeviceOps:
    """Returns the reduction that suits `devices`; `choose_cross_device_ops` says why too."""
    ops, reason = choose_cross_device_ops(devices, tuning=tuning)
    _logger.info("%s reduces: %s.", type(ops).__name__, reason)
    return ops


def choose_cross_device_ops(
    devices: Sequence[DeviceLike], *, has_nccl: bool | None = None, tuning: Prices | None = None
) -> Choice:
    """Returns the reduction that suits `devices`, and why.

        GPUs that are all different         NCCL
        the same without NCCL, and
        GPUs of which replicas share some   the hierarchical copy, by the links of the machine
        one memory, or GPUs and host        the reduction on one device

    Where links were measured and every replica has its own memory, what is not NCCL is the one
    of the two that is predicted to be faster.

    Args:
        devices: One per replica.
        has_nccl: Whether there is NCCL; by default, whether this torch has it.
        tuning: The measured costs of the links, or None.
    """
    resolved = tuple(map(resolve, devices))
    choice = _by_kind(resolved, has_nccl)
    num_memories = len({this_machine().memory(device) for device in resolved})
    # Between two devices there is one way only.
    if tuning is None or not choice.ops.keeps_to_schedule or num_memories < max(3, len(resolved)):
        return choice
    return _faster(resolved, tuning)


def predicted_cost(
    ops: CrossDeviceOps, devices: tuple[Device, ...], tuning: Prices | None
) -> Line | None:
    """Returns the cost of an all-reduce between devices, or None if it is not known."""
    if tuning is None or not isinstance(ops, ScheduledOps) or not ops.keeps_to_schedule:
        return None
    return ops.cost(Ends(devices, devices), tuning)


def _faster(devices: tuple[Device, ...], tuning: Prices) -> Choice:
    """Returns the reduction whose schedule takes less time for a pack of gradients."""
    from unisono.reductions.all_reduce import HierarchicalCopyAllReduce

    candidates = (ReductionToOneDevice(), HierarchicalCopyAllReduce(num_packs=len(devices)))
    ends = Ends(devices, devices)
    costs = [ops.cost(ends, tuning) for ops in candidates]
    seconds = [cost.seconds(BYTES_PER_PACK) for cost in costs]
    best = seconds.index(min(seconds))
    return Choice(
        candidates[best],
        f"for {BYTES_PER_PACK >> 20} MiB the links as tuned promise {1e3 * min(seconds):.3g} ms, "
        f"not {1e3 * max(seconds):.3g} ms by {type(candidates[1 - best]).__name__}",
    )


def _by_kind(resolved: Sequence[Device], has_nccl: bool | None) -> Choice:  # noqa: FBT001
    machine = this_machine()
    memories = {machine.memory(device) for device in resolved}
    if len(resolved) < 2:
        return Choice(ReductionToOneDevice(), "one replica has nothing to exchange")
    if len(memories) == 1:
        return Choice(
            ReductionToOneDevice(),
            f"{len(resolved)} replicas share one memory, where a sum needs no copy",
        )
    if any(device.type != "cuda" for device in resolved):
        return Choice(ReductionToOneDevice(), "not all replicas are on GPUs")
    from unisono.devices import near_groups
    from unisono.reductions.all_reduce import HierarchicalCopyAllReduce
    from unisono.reductions.nccl import NcclAllReduce

    if len(memories) < len(resolved):
        why_not_nccl = "replicas share GPUs, which NCCL does not allow"
    elif not (torch.distributed.is_nccl_available() if has_nccl is None else has_nccl):
        why_not_nccl = "this torch has no NCCL"
    else:
        return Choice(
            NcclAllReduce(), f"{len(resolved)} different GPUs, whose links NCCL knows how to use"
        )
    groups = " | ".join(
        ", ".join(str(resolved[i]) for i in group) for group in near_groups(resolved)
    )
    return Choice(
        HierarchicalCopyAllReduce(num_packs=len(memories)),
        f"{why_not_nccl}; it sends little between {groups}",
    )
