"""What `TORCH_DISTRIBUTED_DEBUG=DETAIL` adds: calls that go to Gloo are compared, too.

Unisono compares its own collectives always. torch wraps Gloo for that, but not a group written in
Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.communicators import Communicator
from unisono.errors import UnequalCollectivesError


def check_same_call(
    communicator: Communicator, name: str, tensors: Sequence[Tensor], opts: Any
) -> None:
    """Raises unless all ranks make the same call with tensors of the same shapes and dtypes."""
    # Ranks may give each other unequal parts in these.
    has_one_shape = not name.startswith("alltoall")
    kinds = {
        f"{str(one.dtype).removeprefix('torch.')}{list(one.shape) if has_one_shape else ''}"
        for one in tensors
    }
    root = getattr(opts, "rootRank", None)
    own = f"{name}{'' if root is None else f' with root {root}'} of {', '.join(sorted(kinds))}"
    told = communicator.all_gather(torch.frombuffer(bytearray(own.encode()), dtype=torch.uint8))
    calls = [bytes(one.tolist()).decode() for one in told]
    if odd := [rank for rank, call in enumerate(calls) if call != calls[0]]:
        made = "; ".join(f"rank {rank} makes {call}" for rank, call in enumerate(calls))
        raise UnequalCollectivesError(
            f"The ranks call different collectives: {made}. Call the same collectives in the same "
            "order on every rank of the group.",
            odd,
        )
