"""Parts of a batch copied to the devices of their replicas, beside what the devices compute."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.devices import Device, cpu_slots, lend, this_machine
from unisono.input.split.splitter import SplitBatch, copied
from unisono.values import map_leaves, tensors_of

if TYPE_CHECKING:
    from unisono.workers.elastic import ElasticJob


class Placement:
    """Copies the part of each replica to its device.

    What is on a GPU is copied from pinned memory and on a separate stream, so that neither the
    host nor the GPU's other work waits for it. CPU devices share the host's memory: their parts
    stay where they are.

    In an elastic `job`, replicas may be others when a batch is used than when it was drawn. So a
    batch has the parts of all replicas until it is handed out, and keeps them after that: others
    may have to make the step again. Tensors are no copies, which may be at other places in memory,
    where some libraries compute other bits. torch counts the writes to them.
    """

    def __init__(
        self, devices: Sequence[Device], *, to_devices: bool, job: ElasticJob | None = None
    ) -> None:
        self._is_to_devices = to_devices
        self._job = job
        self.move(devices)

    def move(self, devices: Sequence[Device]) -> None:
        """Sets the devices of the replicas that this worker has from now on."""
        self.devices = tuple(devices) if self._is_to_devices else cpu_slots(len(devices))
        machine = this_machine()
        self._targets = [machine.torch_device(device) for device in self.devices]
        gpus = [target for target in dict.fromkeys(self._targets) if target.type == "cuda"]
        self._streams = {gpu: torch.cuda.Stream(gpu) for gpu in gpus}

    def place(self, parts: SplitBatch) -> SplitBatch:
        """Starts the copies. Any thread may do this."""
        return parts if self._job is not None else self._copied(parts)

    def hand_out(self, parts: SplitBatch) -> SplitBatch:
        """Returns the parts of this worker, whose copies the GPUs wait for."""
        if self._job is not None:
            if parts.step is None:
                own, everywhere = self._job.layout.own, parts.leaves
                leaves = [tuple(map(_apart, leaf[own.start : own.stop])) for leaf in everywhere]
                generation = self._job.generation
                parts = replace(parts, leaves=leaves, of_all=everywhere, generation=generation)
            parts = self._copied(parts)
        return arrived(parts)

    def _copied(self, parts: SplitBatch) -> SplitBatch:
        if not self._streams:
            return parts
        # Input that was made on a GPU may still be in the making, on the stream of this thread.
        made_on = {tensor.device for tensor in tensors_of(parts.leaves) if tensor.is_cuda}
        for stream, gpu in itertools.product(self._streams.values(), made_on):
            stream.wait_stream(torch.cuda.current_stream(gpu))
        leaves = [
            tuple(
                component if target.type != "cuda" else self._copy(component, target)
                for component, target in zip(leaf, self._targets, strict=True)
            )
            for leaf in parts.leaves
        ]
        copies = tuple((gpu, stream.record_event()) for gpu, stream in self._streams.items())
        return replace(parts, leaves=leaves, copies=copies)

    def _copy(self, component: Any, target: torch.device) -> Any:
        if isinstance(component, (list, tuple)):
            # One tensor per sample.
            return map_leaves(functools.partial(self._copy, target=target), component)
        if not isinstance(component, Tensor):
            return component
        if component.device.type == "cpu" and component.numel() and not component.is_pinned():
            component = component.pin_memory()
        with torch.cuda.stream(self._streams[target]):
            return component.to(target, non_blocking=True)


def arrived(parts: SplitBatch) -> SplitBatch:
    """Makes what the caller does next on the GPUs wait for the copies."""
    for gpu, event in parts.copies:
        torch.cuda.current_stream(gpu).wait_event(event)
    if parts.copies:
        # The copying stream must not take their memory back while this one still reads it.
        lend(tensors_of(parts.leaves))
    return parts


def _apart(part: Any) -> Any:
    return part if isinstance(part, Tensor) else copied(part)
