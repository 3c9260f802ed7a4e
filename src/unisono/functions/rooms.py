"""Where a captured step reads its arguments, and what it returns."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.errors import CaptureError
from unisono.functions.recording import Recording
from unisono.torch_private import copy_each
from unisono.values import map_tensors, tensors_of

# Kernels may give other bits for memory that begins elsewhere in such a line.
_LINE = 64


def room_like(tensor: Tensor) -> Tensor:
    """Returns memory for a tensor, with the same layout and alignment."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in sizes) if tensor.numel() else 0
    width = tensor.element_size()
    held = torch.empty(span + _LINE // width, dtype=tensor.dtype, device=tensor.device)
    begin = (tensor.data_ptr() - held.data_ptr()) % _LINE // width
    return held.as_strided(tensor.shape, tensor.stride(), begin)


def without_repetition(tensor: Tensor) -> Tensor:
    """Returns a tensor without what `expand` has repeated."""
    for place, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(place, 0, 1)
    return tensor


class WithoutHistory(torch.autograd.Function):
    """Makes a result that seems to have a history, as that of the eager step, and has none."""

    @staticmethod
    def forward(ctx: Any, result: Tensor) -> Tensor:
        """Returns a copy."""
        return result.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Raises."""
        raise CaptureError(
            "`backward()` was called on a result of a step that `unisono.function` has captured, "
            "and a replay does not note what gradients need. Call it in the step, or return "
            "`result.detach()`."
        )

    @classmethod
    def of(cls, result: Tensor) -> Tensor:
        """Returns a copy of a result."""
        copy: Tensor = cls.apply(result.detach().requires_grad_())  # type: ignore[no-untyped-call]
        return copy


class Capture:
    """A recording, where it reads the arguments, and where its results are."""

    def __init__(self, recording: Recording, tensors: Sequence[Tensor]) -> None:
        self.recording = recording
        # Copies of the arguments, where the graphs will read them.
        made: dict[int, Tensor] = {}
        alike: dict[Hashable, list[int]] = {}
        for i, tensor in enumerate(tensors):
            if id(tensor) not in made:
                made[id(tensor)] = room_like(tensor)
                alike.setdefault((tensor.dtype, tensor.device), []).append(i)
        self.rooms = [made[id(tensor)] for tensor in tensors]
        # The rooms without dimensions that repeat the same memory, and whether there are such.
        distinct = [without_repetition(room) for room in self.rooms]
        self._repeats = any(map(operator.is_not, distinct, self.rooms))
        # Those of one dtype on one GPU, which one kernel can fill, and the numbers of what fills
        # them. A step may call `requires_grad_()` of an argument.
        groups = alike.values()
        self._alike = [([distinct[i].detach() for i in numbers], numbers) for numbers in groups]
        # Where results are, the numbers of those that one kernel can copy, and how to copy others.
        self._outputs: Any = None
        self._kept: list[Tensor] = []
        self._results: dict[Hashable, list[int]] = {}
        self._copied_alone: dict[int, Callable[[Tensor], Tensor]] = {}
        self.fill(tensors)

    def note_outputs(self, results: Any) -> None:
        """Takes what the captured run has returned."""
        self._outputs = self.recording.kept(results)
        for i, (kept, own) in enumerate(
            zip(tensors_of(self._outputs), tensors_of(results), strict=True)
        ):
            self._kept.append(kept)
            if own.grad_fn is not None:
                # Its history no replay makes again.
                self._copied_alone[i] = WithoutHistory.of
            elif kept.requires_grad or kept.is_inference():
                self._copied_alone[i] = Tensor.clone
            else:
                self._results.setdefault((kept.dtype, kept.device), []).append(i)

    def fill(self, tensors: Sequence[Tensor]) -> None:
        """Copies the arguments of this call to where the graphs read them."""
        if self._repeats:
            tensors = list(map(without_repetition, tensors))
        for rooms, numbers in self._alike:
            copy_each(rooms, [tensors[i] for i in numbers], non_blocking=True)

    def results(self) -> Any:
        """Returns copies of the results, which the next replay does not change."""
        made = list(map(torch.empty_like, self._kept))
        for i, copied in self._copied_alone.items():
            made[i] = copied(self._kept[i])
        for numbers in self._results.values():
            copy_each([made[i] for i in numbers], [self._kept[i] for i in numbers])
        new = iter(made)
        return map_tensors(lambda _: next(new), self._outputs)
