"""Parts of a batch copied to the devices of their replicas, beside what the devices compute."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unisono.devices import Device, cpu_slots, this_machine
from unisono.input.splits.splitter import SplitBatch, copied
from unisono.reductions import Workers
from unisono.values import map_leaves, tensors_of


@dataclass(frozen=True)
class PlacedBatch:
    """One step's input on its devices, where the copies may still be under way."""

    parts: SplitBatch
    copied: dict[torch.device, torch.cuda.Event]


class Placement:
    """Copies the part of each replica to its device.

    What is on a GPU is copied from pinned memory and on a separate stream, so that neither the
    host nor the GPU's other work waits for it. CPU devices share the host's memory: their parts
    stay where they are.
    """

    def __init__(self, devices: Sequence[Device], *, to_devices: bool) -> None:
        self.devices = tuple(devices) if to_devices else cpu_slots(len(devices))
        machine = this_machine()
        self._targets = [machine.torch_device(device) for device in self.devices]
        gpus = [target for target in dict.fromkeys(self._targets) if target.type == "cuda"]
        self._streams = {gpu: torch.cuda.Stream(gpu) for gpu in gpus}

    def place(self, parts: SplitBatch) -> PlacedBatch:
        """Starts the copies. Any thread may do this."""
        if not self._streams:
            return PlacedBatch(parts, {})
        for stream in self._streams.values():
            _wait_for_gpu_tensors(stream, parts)
        leaves = [
            tuple(
                component if target.type != "cuda" else self._copied(component, target)
                for component, target in zip(leaf, self._targets, strict=True)
            )
            for leaf in parts.leaves
        ]
        copied = {gpu: stream.record_event() for gpu, stream in self._streams.items()}
        return PlacedBatch(replace(parts, leaves=leaves), copied)

    def _copied(self, component: Any, target: torch.device) -> Any:
        if isinstance(component, (list, tuple)):
            # One tensor per sample.
            return map_leaves(functools.partial(self._copied, target=target), component)
        if not isinstance(component, Tensor):
            return component
        if component.device.type == "cpu" and component.numel() and not component.is_pinned():
            component = component.pin_memory()
        with torch.cuda.stream(self._streams[target]):
            return component.to(target, non_blocking=True)

    def hand_out(self, placed: PlacedBatch) -> SplitBatch:
        """Makes what the caller does next on the GPUs wait for the copies."""
        for gpu, event in placed.copied.items():
            current = torch.cuda.current_stream(gpu)
            current.wait_event(event)
            for tensor in tensors_of(placed.parts.leaves):
                if tensor.device == gpu:
                    # Its memory came from the copying stream, which must not take it back while
                    # this one still reads it.
                    tensor.record_stream(current)
        return placed.parts


class MovingPlacement(Placement):
    """Places batches for replicas that may be others when a batch is used than when it was drawn.

    A batch has the parts of all replicas until it is handed out, and keeps them after that: the
    step may have to be made again by others. Tensors are no copies, which may be at other places in
    memory, where some libraries compute other bits. torch counts the writes to them.
    """

    def __init__(self, devices: Sequence[Device], workers: Workers, *, to_devices: bool) -> None:
        super().__init__(devices, to_devices=to_devices)
        self._workers = workers
        self._is_to_devices = to_devices
        self._generation = 0

    def move(self, devices: Sequence[Device], generation: int) -> None:
        """Says which replicas this worker has from now on, among which workers."""
        Placement.__init__(self, devices, to_devices=self._is_to_devices)
        self._generation = generation

    def place(self, parts: SplitBatch) -> PlacedBatch:
        return PlacedBatch(parts, {})

    def hand_out(self, placed: PlacedBatch) -> SplitBatch:
        parts = placed.parts
        if parts.step is not None:
            # The parts of this worker, which others do not have.
            return super().hand_out(super().place(parts))
        own = self._workers.layout(len(self.devices)).own
        mine = [tuple(map(_apart, leaf[own.start : own.stop])) for leaf in parts.leaves]
        parts = replace(parts, leaves=mine, of_all=parts.leaves, generation=self._generation)
        return super().hand_out(super().place(parts))


def _apart(part: Any) -> Any:
    return part if isinstance(part, Tensor) else copied(part)


def _wait_for_gpu_tensors(stream: torch.cuda.Stream, parts: SplitBatch) -> None:
    """Input that was made on a GPU may still be in the making, on the stream of this thread."""
    made_on = {tensor.device for tensor in tensors_of(parts.leaves) if tensor.is_cuda}
    for gpu in made_on:
        stream.wait_stream(torch.cuda.current_stream(gpu))
