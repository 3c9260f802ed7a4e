"""The bucket that a communication hook gets."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class GradBucket:
    """The gradients of some parameters of one dtype, in one flat tensor.

    It has the methods of `torch.distributed.GradBucket`, which only torch itself can make.

    Args:
        index: Its place among the buckets of the backward pass.
        buffer: The gradients, flat.
        parameters: The parameters of the gradients, in order.
        is_last: Whether no other bucket of this backward pass follows.
    """

    def __init__(
        self, index: int, buffer: Tensor, parameters: Sequence[Tensor], *, is_last: bool
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._parameters = parameters
        self._is_last = is_last

    def index(self) -> int:
        """Which bucket of the backward pass this is; bucket 0 has the last layers."""
        return self._index

    def is_last(self) -> bool:
        """Whether no other bucket of this backward pass follows."""
        return self._is_last

    def buffer(self) -> Tensor:
        """The gradients, flat: on the way in, the mean over the replicas of this worker.

        With `num_replicas`, those of one replica.
        """
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replaces the buffer with `buffer`, another tensor with the same number of elements."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """The gradient of each parameter, as a view of the buffer."""
        parts = self._buffer.split([one.numel() for one in self._parameters])
        return [part.view(one.shape) for part, one in zip(parts, self._parameters, strict=True)]

    def parameters(self) -> list[Tensor]:
        """The parameters, as the program has them."""
        return list(self._parameters)
