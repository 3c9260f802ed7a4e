"""What carries the messages of an `Exchange`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch import Tensor

from unisono.communicators.gloo import GRACE_SECONDS, break_connections

# Waits for so many seconds, and returns whether what was begun is done.
Finished = Callable[[float], bool]


class BrokenConnectionError(Exception):
    """A connection that carries a collective has broken, for a reason that the watch is to find.

    Attributes:
        peer: The rank at the other end, if it is known.
    """

    def __init__(self, why: str, peer: int | None = None) -> None:
        super().__init__(why)
        self.peer = peer


class Transport(Protocol):
    """Messages of bytes between ranks, which all begin the same ones in the same order.

    What is given must not change, nor what is received be read, before it is finished. A connection
    that breaks is a `BrokenConnectionError`.

    Attributes:
        rank: Which rank this is.
        size: How many there are.
    """

    rank: int
    size: int

    def all_to_all(
        self, output: Tensor, rooms: Sequence[int], given: Tensor, sent: Sequence[int]
    ) -> Finished:
        """Begins to send every rank its part of `given`, and to receive its part from each.

        Args:
            output: Where to put what is received, one room for each rank after the other. What is
                in that of this rank is undefined.
            rooms: The length of each room. A message may be shorter, and lies at its beginning.
            given: What to send, one part for each rank after the other.
            sent: The length of each part. Nothing is sent where both lengths are 0.
        """
        ...

    def broadcast(self, tensors: Mapping[int, Tensor]) -> Finished:
        """Begins to overwrite each tensor with that of the rank it stands under."""
        ...

    def set_timeout(self, seconds: float) -> None:
        """Says for how long who uses it may wait, so that it does not give up before."""
        ...

    def awaited(self) -> list[int]:
        """Returns the ranks from which something is still to come, as far as that is known."""
        ...

    def close(self, *, has_failed: bool) -> None:
        """Ends connections and threads, also those that other threads wait for.

        After a failure nobody may go on with what was sent before.
        """
        ...


class ProcessGroupTransport:
    """A process group of torch.distributed, Gloo or MPI."""

    def __init__(self, group: Any) -> None:
        self.rank: int = group.rank()
        self.size: int = group.size()
        self._group = group

    def all_to_all(
        self, output: Tensor, rooms: Sequence[int], given: Tensor, sent: Sequence[int]
    ) -> Finished:
        """Begins to send every rank its part of `given`, and to receive its part from each."""
        return _finished([self._group.alltoall_base(output, given, list(rooms), list(sent))])

    def broadcast(self, tensors: Mapping[int, Tensor]) -> Finished:
        """Begins to overwrite each tensor with that of the rank it stands under."""
        return _finished([self._group.broadcast(tensors[root], root) for root in tensors])

    def set_timeout(self, seconds: float) -> None:
        """Lets Gloo, which gives up by itself, wait longer; MPI never gives up."""
        if hasattr(self._group, "recv"):
            self._group._set_default_timeout(timedelta(seconds=seconds + GRACE_SECONDS))

    def awaited(self) -> list[int]:
        """A process group does not tell."""
        return []

    def close(self, *, has_failed: bool) -> None:
        """Ends connections and threads, at which others fail in any case."""
        group, self._group = self._group, None
        if hasattr(group, "recv"):
            break_connections(group)


def _finished(works: list[Any]) -> Finished:
    def finished(seconds: float) -> bool:
        while works:
            try:
                works[0].wait(timedelta(seconds=seconds))
            except RuntimeError as error:
                if works[0].is_completed():
                    raise BrokenConnectionError(str(error).splitlines()[0]) from error
                return False
            works.pop(0)
        return True

    return finished
