"""A communicator that runs the collectives of a group in their order, each with its timeout."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import Store, Work

from unisono.communicators import Communicator, TracedCommunicator, connect
from unisono.communicators.gloo import GlooMaker
from unisono.groups import CollectiveWork
from unisono.tracing import join_workers

_IDLE_SECONDS = 0.05


class Lane:
    """Runs collectives one after the other, in the order in which they were given.

    A caller that waits anyway runs its collective itself if none is before it: two thread switches
    cost more than a small collective. Others go to a thread, which starts with the first of them,
    and ends when it has had nothing to do for a moment.

    What is called on that thread, by a callback of the collective that has just ended, runs before
    all that waits: the callback may wait for it. So the order is the same as where the collective
    had ended before it got its callback.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: SimpleQueue[CollectiveWork | None] = SimpleQueue()
        self._turn = threading.Lock()
        self._change = threading.Lock()
        self._num_queued = 0
        self._is_served = False
        self._thread: threading.Thread | None = None
        self._serving: int | None = None

    def run(self, work: CollectiveWork, *, is_awaited: bool) -> None:
        """Runs `work` now if it is awaited and nothing is before it, or else soon."""
        if threading.get_ident() == self._serving:
            work.run()
            return
        if is_awaited and self._num_queued == 0 and self._turn.acquire(blocking=False):
            try:
                work.run()
            finally:
                self._turn.release()
            return
        with self._change:
            if not self._is_served:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
                self._is_served = True
            self._num_queued += 1
            # With the lock, so that the thread does not end before it has this.
            self._queue.put(work)

    def close(self) -> None:
        """Returns when everything that was given has ended. May be called twice."""
        with self._change:
            thread, self._thread = self._thread, None
            if self._is_served:
                self._is_served = False
                self._queue.put(None)
        if thread is not None:
            thread.join()

    def _serve(self) -> None:
        self._serving = threading.get_ident()
        while (work := self._next()) is not None:
            with self._turn:
                work.run()
            with self._change:
                self._num_queued -= 1
            # Nobody but those who wait for it should keep its tensors.
            del work

    def _next(self) -> CollectiveWork | None:
        """Returns what comes next, or None at the end."""
        work, is_over = None, False
        while work is None and not is_over:
            try:
                work = self._queue.get(timeout=_IDLE_SECONDS)
                is_over = work is None
            except Empty:
                is_over = True
            with self._change:
                is_over = is_over and self._queue.empty()
                if is_over:
                    self._is_served, self._serving = False, None
        return work


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
