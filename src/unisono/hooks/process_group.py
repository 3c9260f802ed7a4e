"""The workers of a strategy as a torch process group, for torch's own hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from unisono.communicators import Communicator
from unisono.errors import UnsupportedError
from unisono.groups import CollectiveWork, CommunicatorGroup, Movement, tensors_in


class WorkersGroup(CommunicatorGroup):
    """A process group whose collectives run over the communicator of a strategy.

    So they have its order of sums, its deadlines, its errors, and its shared memory. Functions of
    `torch.distributed` such as `all_reduce` and `all_gather` take it as `group`. Each collective is
    done when the call returns. The group is not registered with torch, so functions that look up
    ranks in torch do not know it.

    Args:
        communicator: Connects the workers.
    """

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator.rank, communicator.size)
        self.communicator = communicator

    def _carries(self, device: torch.device) -> bool:
        return True

    def _begin(self, call: Movement, outputs: list[Tensor], name: str, opts: Any) -> Work:
        work = CollectiveWork(name, lambda: call(self.communicator), outputs)
        work.run()
        work.wait()
        return work

    def _pass_on(self, name: str, *args: Any, **options: Any) -> Work:
        given = [
            f"{one.dtype} {tuple(one.shape)}" for one in tensors_in([*args, *options.values()])
        ]
        op = getattr(args[-1], "reduceOp", None) if args else None
        how = "" if op is None else f" with {getattr(op, 'op', op)}"
        raise UnsupportedError(
            f"The workers of a strategy cannot do {name}{how} on {', '.join(given) or 'nothing'}. "
            "They broadcast, gather and reduce dense tensors of one kind, with SUM, AVG, MIN, MAX "
            "or PRODUCT."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(worker {self.rank()} of {self.size()})"
