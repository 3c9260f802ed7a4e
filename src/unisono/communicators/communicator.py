"""What every way to talk between workers can do, and that of one rank alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from unisono.communicators.headers import Header
from unisono.costs import Line
from unisono.errors import UnsupportedError
from unisono.kernels import combine_into
from unisono.options import ReduceOp

if TYPE_CHECKING:
    from typing_extensions import Self


class GraphEngine(Protocol):
    """What carries collectives that CUDA graphs may hold: in those of all ranks, or of none.

    Attributes:
        is_captured: Whether collectives become a part of a graph now.
    """

    is_captured: bool

    def agree(self, what: str) -> None:
        """Raises an `UnequalCollectivesError` on all ranks unless they say the same."""

    def check_usable(self, what: object) -> None:
        """Raises a `CommunicationError` if a graph with its collectives must not be replayed."""

    def settle(self, what: object) -> None:
        """Waits for the GPU; stops its collectives and raises if a rank is lost meanwhile."""


class Communicator(ABC):
    """Ranks 0 to `size - 1` that call the same collectives in the same order.

    A collective ends on every rank with the same bits, or raises a `CommunicationError` that names
    the ranks at fault. After that the communicator can only be closed.

    Sums follow the order of the whole library, a tree over neighbors (`unisono.kernels.tree`), so
    they do not depend on who carries them. A rank may bring several terms: the terms of rank 0 come
    first, then those of rank 1, and so on. Every rank brings the same number; `all_reduce_nodes` is
    for ranks that do not.

    Tensors are dense; an implementation says in `takes` which memories it serves.

    Attributes:
        name: In words, what carries the collectives.
        timeout_seconds: How long a collective may wait for others; None if it never waits.
    """

    name: str

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.cost: Line | None = None
        self.timeout_seconds: float | None = None

    def takes(self, device: torch.device) -> bool:
        """Returns whether tensors on `device` can be given; those on the CPU can."""
        return device.type == "cpu"

    def keeps_order(self, tensor: Tensor) -> bool:
        """Returns whether sums of tensors like this one follow the order of the whole library."""
        return True

    @property
    def graph_engine(self) -> GraphEngine | None:
        """What carries collectives of GPU tensors, if CUDA graphs may hold them."""
        return None

    @abstractmethod
    def all_reduce(self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None) -> None:
        """Combines all terms of all ranks into the first term of each rank.

        The terms are contiguous and have one shape and dtype. The others may be overwritten.

        Args:
            count: For a mean, what to divide the sum by; the number of all terms if not given.
        """

    def reduce_scatter(
        self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None
    ) -> Tensor:
        """Combines all terms, and returns the part of this rank in the flattened result.

        The parts are `slice_of(rank, size, numel)`.
        """
        copies = [term.detach().clone() for term in terms]
        self.all_reduce(op, copies, count)
        return self._own_part(copies[0])

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, by rank. Their shapes may differ, but no dtype."""

    @abstractmethod
    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        """Returns the tensors of all ranks on `root`, and None elsewhere."""

    def all_to_all(self, tensor: Tensor) -> list[Tensor]:
        """Gives every rank its part of a tensor, and returns this rank's part of each, by rank."""
        flat = tensor.detach().reshape(-1)
        parts = [flat[slice_of(rank, self.size, len(flat))] for rank in range(self.size)]
        gathered = [self.gather(part, rank) for rank, part in enumerate(parts)]
        return next(found for found in gathered if found is not None)

    def reduce_parts(self, op: ReduceOp, terms: Sequence[Tensor]) -> None:
        """Combines all terms into the part of this rank in its contiguous first term, undivided.

        The other parts must stay as they are until the next collective.
        """
        flat = terms[0].detach().view(-1)
        part = self.reduce_scatter(op, terms)
        flat[slice_of(self.rank, self.size, len(flat))] = part

    def share_parts(self, tensor: Tensor) -> None:
        """Overwrites each part of the contiguous `tensor` with that of the rank of the part."""
        flat = tensor.detach().view(-1)
        for root in range(self.size):
            self.broadcast(flat[slice_of(root, self.size, len(flat))], root)

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Overwrites the contiguous `tensor` with that of `root`."""

    def lead(
        self,
        greeting: bytes,
        terms: Sequence[Tensor] = (),
        work: Callable[[list[Tensor]], None] | None = None,
    ) -> Sequence[bytes] | None:
        """Lets rank 0 make something of the terms of all ranks, which all others get.

        The terms are contiguous and alike, and the greeting is a multiple of 16 bytes. On rank 0,
        `work` gets the terms of all ranks, which it may overwrite, and writes its result into the
        first term there. Without `work`, ranks only greet each other. If they do not greet alike,
        nothing else happens, and the greetings of all ranks are returned.
        """
        greeted = torch.frombuffer(bytearray(greeting), dtype=torch.uint8)
        gathered = self.all_gather(torch.cat([greeted, *map(as_bytes, terms)]))
        greetings = [one[: len(greeting)].numpy().tobytes() for one in gathered]
        if any(one != greeting for one in greetings):
            return greetings
        if work is None:
            return None
        if self.rank == 0:
            dtype, shape = terms[0].dtype, terms[0].shape
            rows = [one[len(greeting) :].view(len(terms), -1) for one in gathered]
            work([term.view(dtype).view(shape) for row in rows for term in row])
        self.broadcast(terms[0])
        return None

    @abstractmethod
    def barrier(self) -> None:
        """Returns when every rank has called it."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Returns bytes from which collectives need not copy. All ranks ask for the same number."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    @contextmanager
    def within(self, seconds: float | None) -> Iterator[None]:
        """In the block, a collective may wait `seconds` for others; with None, as long as always.

        Every rank must say the same, or some give up before others.
        """
        usual = self.timeout_seconds
        if seconds is None or usual is None or seconds == usual:
            yield
            return
        self.set_timeout(seconds)
        try:
            yield
        finally:
            self.set_timeout(usual)

    @abstractmethod
    def set_timeout(self, seconds: float) -> None:
        """Says how long collectives may wait for others from now on; see `within`."""

    @abstractmethod
    def check_health(self) -> None:
        """Raises a `CommunicationError` if a rank is lost. Other ranks need not call it."""

    @abstractmethod
    def close(self) -> None:
        """Leaves, and gives back memory, connections and threads. May be called twice."""

    def _own_part(self, whole: Tensor) -> Tensor:
        """Returns a copy of the part of this rank in a contiguous tensor, flattened."""
        flat = whole.view(-1)
        return flat[slice_of(self.rank, self.size, len(flat))].clone()

    def check_root(self, root: int) -> None:
        """Raises unless `root` is a rank of this communicator."""
        if not 0 <= root < self.size:
            raise UnsupportedError(f"`root` must be a rank from 0 to {self.size - 1}, got {root}.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def slice_of(rank: int, size: int, num_elements: int) -> slice:
    """Returns the part of `rank` when elements are shared as evenly as possible."""
    return slice(num_elements * rank // size, num_elements * (rank + 1) // size)


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a contiguous tensor, which are not copied."""
    return tensor.detach().view(-1).view(torch.uint8)


def gather_texts(communicator: Communicator, text: str) -> list[str]:
    """Returns the texts of all ranks, by rank, none of which is empty."""
    own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return [one.numpy().tobytes().decode() for one in communicator.all_gather(own)]


class IdentityCommunicator(Communicator):
    """A communicator of size one, for programs that need not know whether they are alone."""

    name = "one rank alone"

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def takes(self, device: torch.device) -> bool:
        return True

    def all_reduce(self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None) -> None:
        Header.of_terms("all_reduce", 0, op, terms, count)
        combine_into(op, terms, terms[:1], count)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.detach().clone()]

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        self.check_root(root)
        return self.all_gather(tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        self.check_root(root)

    def barrier(self) -> None:
        """Returns at once: there is nobody to wait for."""

    def check_health(self) -> None:
        """Returns at once: there is nobody who could be lost."""

    def set_timeout(self, seconds: float) -> None:
        """Does nothing: there is nobody to wait for."""

    def close(self) -> None:
        """Does nothing: there is nothing to free."""
