"""A communication hook: the bucket that it gets, its call, and a check of what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from unisono.errors import UnsupportedError, add_note
from unisono.hooks.contents import content_of, restored

# What the user writes; torch's own hooks are annotated with torch's own bucket.
HookFunction = Callable[[Any, Any], Any]


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


class CommHook:
    """A hook with its state.

    Args:
        who: The replica or worker that calls it, in words.
        rank: The number of that worker.
        size: How many workers there are.
        place: The device of its first replica.
    """

    def __init__(
        self,
        state: object,
        function: HookFunction,
        who: str,
        rank: int = 0,
        size: int = 1,
        place: torch.device | None = None,
    ) -> None:
        if not callable(function):
            raise UnsupportedError(
                f"`hook` must be a function of a state and a bucket, got {function!r}."
            )
        if getattr(state, "process_group", self) is None and not distributed.is_initialized():
            raise UnsupportedError(
                f"{type(state).__name__} has the process group None, which means torch's default "
                "group, and there is none. Pass `strategy.process_group` instead."
            )
        self._state = state
        self._function = function
        self._who = who
        self._rank, self._place = rank, place
        self.kept_for = f"{size} workers"
        self._name = getattr(function, "__name__", type(function).__name__)

    def __call__(self, bucket: GradBucket) -> Tensor:
        """Returns the reduced gradients of a bucket."""
        try:
            result = self._function(self._state, bucket)
            if isinstance(result, torch._C.Future):
                result = result.wait()
            self._check(result, bucket)
        except Exception as error:
            shapes = ", ".join(str(tuple(one.shape)) for one in bucket.parameters())
            add_note(
                error,
                f"Raised by the communication hook {self._name!r} on {self._who}, for bucket "
                f"{bucket.index()} with parameters of shape {shapes}.",
            )
            raise
        found: Tensor = result
        return found

    def contents(self) -> dict[int, Any]:
        """Returns what the hook keeps, by the number of its worker."""
        return {self._rank: content_of((self._state, self._function))}

    def load(self, contents: dict[int, Any]) -> None:
        """Goes on with what the hooks of all workers kept."""
        given = self._state, self._function
        own = contents[self._rank]
        self._state, self._function = restored(given, own, self._place, in_place=True)

    def _check(self, result: object, bucket: GradBucket) -> None:
        wanted = bucket.buffer().numel()
        if not isinstance(result, Tensor):
            found = f"a {type(result).__name__}"
        elif result.numel() != wanted:
            found = f"a tensor of shape {tuple(result.shape)}"
        else:
            return
        raise UnsupportedError(
            f"The communication hook {self._name!r} returned {found}. Return the reduced gradients "
            f"of the bucket, a tensor of {wanted} elements, or a future of it."
        )
