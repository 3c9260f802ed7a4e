"""The workers of a strategy as a torch process group, for torch's own hooks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
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
    ranks in torch do not know it. In a hook that is called for each replica, the ranks are the
    replicas of all workers.

    Args:
        communicator: Connects the workers. None if they change while the program runs.
    """

    def __init__(self, communicator: Communicator | None) -> None:
        rank, size = (0, 1) if communicator is None else (communicator.rank, communicator.size)
        super().__init__(rank, size)
        self._communicator = communicator
        self._of_thread = threading.local()

    @property
    def communicator(self) -> Communicator:
        """Connects the workers, or in a hook of a replica, the replicas."""
        found: Communicator | None = getattr(self._of_thread, "found", self._communicator)
        if found is None:
            raise UnsupportedError(
                "The workers of a strategy with `elastic=True` change while the program runs, so "
                "they are a process group in a communication hook only. Use `all_reduce` of the "
                "replica context."
            )
        return found

    @contextmanager
    def standing_for(self, communicator: Communicator) -> Iterator[None]:
        """In the block, on this thread, the ranks are those of another communicator."""
        self._of_thread.found = communicator
        try:
            yield
        finally:
            del self._of_thread.found

    def rank(self) -> int:
        """The rank of this worker, or of the replica whose hook runs."""
        return self.communicator.rank

    def size(self) -> int:
        """The number of workers, or of replicas."""
        return self.communicator.size

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
        one = self._communicator
        return f"WorkersGroup({f'worker {one.rank} of {one.size}' if one else ''})"
