"""A communicator that runs the collectives of a group in their order, each with its timeout."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import Store, Work

from unisono.backend.lane import Lane
from unisono.communicators import Communicator, TracedCommunicator, connect
from unisono.communicators.gloo import GlooMaker
from unisono.groups import CollectiveWork
from unisono.tracing import join_workers

# The `join` of DDP gives the work that counts the ranks to C++, which calls its methods later but
# does not keep the Python object. The object must outlive the forward pass.
_KEPT_WORKS = 64


class Engine:
    """Connects the ranks of a group. Every rank makes it at the same time."""

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, gloo: GlooMaker
    ) -> None:
        self.timeout = timeout
        self.num_begun = 0
        self._seconds = timeout.total_seconds()
        self._lane = Lane(f"unisono-backend-{rank}")
        self._kept: deque[Work] = deque(maxlen=_KEPT_WORKS)
        # torch allocates the tensors, so no memory is shared but that of the collectives.
        connected = connect(
            store, rank, size, timeout_seconds=self._seconds, can_allocate=False, gloo=gloo
        )
        self._communicator = _traced(connected)

    def begin(
        self, call: Callable[[Communicator], None], outputs: list[Tensor], name: str, opts: Any
    ) -> Work:
        """Runs `call` when its turn comes: at once, or on a thread."""
        self.num_begun += 1
        # A timeout that is not set is negative.
        given = opts.timeout
        seconds = (given if given.days >= 0 else self.timeout).total_seconds()
        work = CollectiveWork(name, lambda: call(self._patient(seconds)), outputs)
        # Older versions of torch do not say whether it is awaited.
        is_awaited = not getattr(opts, "asyncOp", True)
        if not is_awaited and len(outputs) == 1 and outputs[0].numel() == 1:
            self._kept.append(work)
        self._lane.run(work, is_awaited=is_awaited)
        return work

    def close(self) -> None:
        """Returns when everything that was begun has ended. May be called twice."""
        self._lane.close()
        self._communicator.close()
        self._kept.clear()

    def _patient(self, seconds: float) -> Communicator:
        """Returns the communicator, which waits for other ranks as long as this call may."""
        if seconds != self._seconds:
            self._communicator.set_timeout(seconds)
            self._seconds = seconds
        return self._communicator


def _traced(communicator: Communicator) -> Communicator:
    """Returns a communicator whose collectives are recorded. Every rank of a group calls it."""
    if not distributed.is_initialized():
        join_workers(communicator.rank, communicator.size)
    # Traces of the ranks are matched by it, so no other group of the job may have the same.
    number = torch.tensor(secrets.randbits(48))
    try:
        communicator.broadcast(number)
    except BaseException:
        communicator.close()
        raise
    return TracedCommunicator(communicator, group=int(number))
