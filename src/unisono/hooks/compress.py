"""Gradients in half precision on the wire.

Each worker sends its share of the mean, rounded; the shares are added up in float32; the sum is
rounded once more for its way back. So every step rounds twice: on each worker that sends, and on
the one that adds. Error feedback keeps both errors, and adds them in the next step:

    share + residual         -> rounded -> sent         the worker that sends keeps the difference
    sum of shares + residual -> rounded -> sent back    the worker that adds keeps the difference

With error feedback every worker adds up a part of each bucket, in two steps as before and with the
same number of bytes: parts to their workers, sums back to all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unisono.arguments import check_bool, in_words
from unisono.communicators import Communicator
from unisono.errors import UnsupportedError
from unisono.hooks.hook import GradBucket
from unisono.hooks.process_group import WorkersGroup
from unisono.kernels import divide, tree_reduce, wide_dtype
from unisono.options import ReduceOp

_NARROW = (torch.bfloat16, torch.float16)
_COMPRESSED = (torch.float32, torch.float64)


class Compress:
    """A communication hook that sends float32 and float64 gradients in half precision.

    Values that overflow float16 arrive as infinity, which a `GradScaler` detects, and leave no
    residual. Gradients of other dtypes are sent as they are.

    Args:
        dtype: `torch.bfloat16`, or `torch.float16` with more digits and less range.
        error_feedback: Whether to add the rounding error in the next step. It needs the same memory
            as the gradients.
    """

    def __init__(
        self, dtype: torch.dtype = torch.bfloat16, *, error_feedback: bool = False
    ) -> None:
        if not isinstance(dtype, torch.dtype) or dtype not in _NARROW:
            raise UnsupportedError(
                f"`Compress` takes torch.bfloat16 or torch.float16, got {in_words(dtype)}."
            )
        check_bool("error_feedback", error_feedback)
        self._dtype = dtype
        self._has_feedback = error_feedback
        # By bucket number: the rounding errors of this worker's share, and of the sums that it
        # computed for all.
        self._shares: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}

    def __call__(self, group: WorkersGroup, bucket: GradBucket) -> Tensor:
        """Reduces a bucket, as `Strategy.register_comm_hook` wants it."""
        communicator = _communicator(group)
        buffer = bucket.buffer()
        if buffer.dtype not in _COMPRESSED:
            communicator.all_reduce(ReduceOp.MEAN, [buffer])
            return buffer
        # Divided first, so that the sum overflows only if the mean does.
        share = divide(buffer, communicator.size, buffer.dtype)
        if self._has_feedback:
            return buffer.copy_(self._sum_with_feedback(communicator, share, bucket.index()))
        sent = share.to(self._dtype)
        communicator.all_reduce(ReduceOp.SUM, [sent])
        return buffer.copy_(sent)

    def _sum_with_feedback(self, communicator: Communicator, share: Tensor, index: int) -> Tensor:
        sent = self._rounded(share, self._shares, index)
        parts = communicator.all_to_all(sent)
        wide = [part.to(wide_dtype(self._dtype)) for part in parts]
        total = self._rounded(tree_reduce(ReduceOp.SUM, wide), self._sums, index)
        return torch.cat(communicator.all_gather(total))

    def _rounded(self, exact: Tensor, residuals: dict[int, Tensor], index: int) -> Tensor:
        """Rounds the sum of the exact values and the residuals, and keeps the new residuals."""
        kept = residuals.get(index)
        # After a change of the model the buckets differ, so their residuals are not known.
        if kept is None or kept.shape != exact.shape:
            kept = torch.zeros_like(exact)
        # A residual from a checkpoint may be on another device.
        kept = residuals[index] = kept.to(exact.device)
        # In place, because fresh memory costs more than the sums.
        kept += exact
        rounded = kept.to(self._dtype)
        # Infinity and NaN would stay in the residual forever.
        kept.sub_(rounded).nan_to_num_(0.0, 0.0, 0.0)
        return rounded

    def state_dict(self) -> dict[str, Any]:
        """Returns the residuals of this worker; each worker has its own."""
        return {"shares": _copied(self._shares), "sums": _copied(self._sums)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` of the same worker returned.

        Raises:
            UnsupportedError: If it is not such a state.
        """
        parts = {}
        for name in ("shares", "sums"):
            found = state_dict.get(name) if isinstance(state_dict, Mapping) else None
            if not isinstance(found, Mapping) or not all(
                isinstance(one, Tensor) for one in found.values()
            ):
                raise UnsupportedError(
                    f"The state of a `Compress` must have `{name}`, a dict of tensors, got "
                    f"{in_words(state_dict)}. Load what its `state_dict()` returned."
                )
            parts[name] = _copied(found)
        self._shares, self._sums = parts["shares"], parts["sums"]


def _copied(residuals: Mapping[int, Tensor]) -> dict[int, Tensor]:
    return {index: residual.clone() for index, residual in residuals.items()}


def _communicator(group: object) -> Communicator:
    if isinstance(group, WorkersGroup):
        return group.communicator
    raise UnsupportedError(
        "`Compress` works on the workers of a strategy. Give `register_comm_hook` None or "
        f"`strategy.process_group` as state, got {group!r}."
    )
