"""Which reduction suits which devices, and why."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed

from unisono.devices import Device, DeviceLike, near_groups, resolve, this_machine
from unisono.reductions.cross_device_ops import CrossDeviceOps
from unisono.reductions.hierarchical import HierarchicalCopyAllReduce
from unisono.reductions.nccl import NcclAllReduce
from unisono.reductions.one_device import ReductionToOneDevice

_logger = logging.getLogger(__name__)


class Choice(NamedTuple):
    """What reduces, and in words why."""

    ops: CrossDeviceOps
    reason: str


def select_cross_device_ops(devices: Sequence[DeviceLike]) -> CrossDeviceOps:
    """Returns the reduction that suits `devices`; `choose_cross_device_ops` says why too."""
    ops, reason = choose_cross_device_ops(devices)
    _logger.info("%s reduces: %s.", type(ops).__name__, reason)
    return ops


def choose_cross_device_ops(
    devices: Sequence[DeviceLike], *, has_nccl: bool | None = None
) -> Choice:
    """Returns the reduction that suits `devices`, and why.

        GPUs that are all different         NCCL
        the same without NCCL, and
        GPUs of which replicas share some   the hierarchical copy, by the links of the machine
        one memory, or GPUs and host        the reduction on one device

    Args:
        devices: One a replica.
        has_nccl: Whether there is NCCL; what this torch has if not given.
    """
    resolved = [resolve(device) for device in devices]
    machine = this_machine()
    memories = {machine.memory(device) for device in resolved}
    if len(resolved) < 2:
        return Choice(ReductionToOneDevice(), "one replica has nobody to exchange values with")
    if len(memories) == 1:
        return Choice(
            ReductionToOneDevice(),
            f"{len(resolved)} replicas share one memory, where a sum needs no copy",
        )
    if any(device.type != "cuda" for device in resolved):
        return Choice(ReductionToOneDevice(), "not all replicas are on GPUs")
    if len(memories) < len(resolved):
        why_not_nccl = "replicas share GPUs, which NCCL does not allow"
    elif not (torch.distributed.is_nccl_available() if has_nccl is None else has_nccl):
        why_not_nccl = "this torch has no NCCL"
    else:
        return Choice(
            NcclAllReduce(), f"{len(resolved)} different GPUs, whose links NCCL knows how to use"
        )
    return Choice(
        HierarchicalCopyAllReduce(num_packs=len(memories)),
        f"{why_not_nccl}; it sends little between {_groups_in_words(resolved)}",
    )


def _groups_in_words(devices: Sequence[Device]) -> str:
    groups = near_groups(devices)
    return " | ".join(", ".join(str(devices[i]) for i in group) for group in groups)
