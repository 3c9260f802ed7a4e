"""Pretending that this host is another one."""

from __future__ import annotations

from contextlib import AbstractContextManager

from unisono.arguments import check_int
from unisono.devices import Machine, pretend, this_machine
from unisono.errors import DeviceError


def virtual_gpus(num_gpus: int) -> AbstractContextManager[Machine]:
    """Within the block `cuda:0` to `cuda:num_gpus - 1` exist, spread over the real GPUs.

    Several of them share a GPU and its memory when there are fewer real ones, so a script for many
    GPUs can be tried on one.

    Args:
        num_gpus: How many there are within the block.

    Raises:
        DeviceError: If this host has no GPU.
    """
    check_int("num_gpus", num_gpus, least=0)
    real = dict.fromkeys(this_machine().gpus)
    if not real:
        raise DeviceError(
            f"Cannot make {num_gpus} virtual GPUs, because this host has no GPU to map them to. "
            "Use CPU devices instead: 'cpu:0', 'cpu:1', and so on."
        )
    gpus = list(real)
    return pretend(gpus=tuple(gpus[i % len(gpus)] for i in range(num_gpus)))


def separate_memories() -> AbstractContextManager[Machine]:
    """Within the block every device has its own memory, also CPU devices and virtual GPUs.

    Values are then really copied from device to device, by the schedule and in the packs that
    the reduction says, so that algorithms for many GPUs can be tried and tested without one. With
    `virtual_gpus`, a captured step has its own graphs and its own stream for each of them.
    """
    return pretend(are_shared=False)
