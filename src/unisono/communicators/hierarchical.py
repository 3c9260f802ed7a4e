"""Several hosts with several ranks each: one communicator inside a host, another between hosts.

                       between hosts, for n bytes, H hosts of L ranks
    all_reduce  small  2 (H - 1) / H n, by the first rank of each host
                large  2 (H - 1) / H n, by all ranks of a host, each for its part

A host adds up its own terms first only where they are a whole branch of the tree of all terms: if
its terms are 2, 4, 8, ... many. Otherwise its first rank brings them to the others one by one,
which takes more bytes and gives the same bits. Half precision travels as float32 once it is a sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from unisono.communicators.choice import PARTS_BYTES
from unisono.communicators.communicator import Communicator, slice_of
from unisono.communicators.headers import Header, check_encoded
from unisono.communicators.hosts import Layout, named_globally
from unisono.communicators.network import NetworkCommunicator
from unisono.communicators.watch import Watch
from unisono.costs import SMALL_BYTES
from unisono.errors import CommunicationError, UnequalCollectivesError
from unisono.kernels import combine_into, undivided, wide_dtype
from unisono.options import ReduceOp

# A large tensor is reduced in about this number of chunks, each large enough to be efficient.
_CHUNKS = 2
_LEAST_CHUNK_BYTES = 4 << 20
_MOST_CHUNK_BYTES = 16 << 20


class HierarchicalCommunicator(Communicator):
    """Ranks on several hosts, all with the same number of ranks, which follow each other."""

    def __init__(
        self,
        inside: Communicator,
        between: NetworkCommunicator,
        layout: Layout,
        watch: Watch,
        *,
        parts_bytes: int = PARTS_BYTES,
    ) -> None:
        assert layout.is_regular, f"hosts must have ranks alike, got {layout}"
        super().__init__(layout.hosts[between.rank][inside.rank], layout.size)
        self.name = f"{inside.name} inside {len(layout.hosts)} hosts, {between.name} between them"
        self.timeout_seconds = between.timeout_seconds
        self._inside = inside
        self._between = between
        self._layout = layout
        self._watch = watch
        self._parts_bytes = parts_bytes
        self._sequence = 0

    def all_reduce(self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None) -> None:
        self._reduce("all_reduce", op, terms, count)

    def reduce_scatter(
        self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None
    ) -> Tensor:
        copies = [term.detach().clone() for term in terms]
        self._reduce("reduce_scatter", op, copies, count)
        return self._own_part(copies[0])

    def _reduce(self, kind: str, op: ReduceOp, terms: Sequence[Tensor], count: int | None) -> None:
        header = Header.of_terms(kind, self._sequence + 1, op, terms, count)
        flat = [term.detach().view(-1) for term in terms]
        if op is ReduceOp.MEAN and count is None:
            count = self.size * len(terms)
        is_small = len(flat) * flat[0].nbytes <= SMALL_BYTES
        with self._collective(header, agrees=not is_small):
            if is_small:
                self._reduce_small(header, op, flat, count)
            elif not _is_power_of_two(self._inside.size * len(terms)):
                self._reduce_one_by_one(op, flat, self._inside.gather(torch.stack(flat)), count)
            else:
                self._reduce_by_host(op, flat, count)

    def _reduce_small(
        self, header: Header, op: ReduceOp, terms: list[Tensor], count: int | None
    ) -> None:
        """Lets the headers and the terms of a host travel together."""

        def reduce(brought: list[Tensor]) -> None:
            # All ranks hear why this one left before the others of its host see it leave.
            with self._watch.told_exits(header):
                if _is_power_of_two(len(brought)):
                    total = torch.empty_like(terms[0], dtype=wide_dtype(terms[0].dtype))
                    wide = [term.to(total.dtype) for term in brought]
                    combine_into(undivided(op), wide, [total], None)
                    brought = [total]
                self._between.all_reduce(op, brought, count)
                terms[0].copy_(brought[0])

        self._check(header, self._inside.lead(header.encode(), terms, reduce))

    def _reduce_one_by_one(
        self,
        op: ReduceOp,
        terms: list[Tensor],
        gathered: Sequence[Tensor] | None,
        count: int | None,
    ) -> None:
        """Lets the first rank of each host carry all terms of the host between hosts."""
        if gathered is not None:
            all_terms = [term for of_rank in gathered for term in of_rank]
            self._between.all_reduce(op, all_terms, count)
            terms[0].copy_(all_terms[0])
        self._inside.broadcast(terms[0])

    def _reduce_by_host(self, op: ReduceOp, terms: list[Tensor], count: int | None) -> None:
        sums = [term.to(wide_dtype(term.dtype)) for term in terms]
        if sums[0].nbytes < self._parts_bytes:
            self._inside.all_reduce(undivided(op), sums)
            if self._inside.rank == 0:
                self._between.all_reduce(op, sums[:1], count)
            self._inside.broadcast(sums[0])
        else:
            self._reduce_by_parts(op, sums, count)
        if sums[0] is not terms[0]:
            terms[0].copy_(sums[0])

    def _reduce_by_parts(self, op: ReduceOp, terms: list[Tensor], count: int | None) -> None:
        """Lets every rank carry its part. A host adds up one chunk while others are under way."""
        chunks = list(zip(*(term.split(_chunk_length(term)) for term in terms), strict=True))

        def own_parts() -> Iterator[Tensor]:
            for chunk in chunks:
                self._inside.reduce_parts(undivided(op), chunk)
                yield chunk[0][slice_of(self._inside.rank, self._inside.size, len(chunk[0]))]

        reduced = self._between.all_reduce_pieces(op, own_parts(), count)
        for (chunk, *_), _ in zip(chunks, reduced, strict=True):
            self._inside.share_parts(chunk)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        own = tensor.detach().contiguous()
        with self._collective(Header.of_tensor("all_gather", self._sequence + 1, own)):
            by_host = self._between.all_gather(own)
            return [one for same in by_host for one in self._inside.all_gather(same)]

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        self.check_root(root)
        own = tensor.detach().contiguous()
        host, position = self._layout.place(root)
        with self._collective(Header.of_tensor("gather", self._sequence + 1, own, root)):
            by_host = self._between.gather(own, host)
            if by_host is None:
                return None
            gathered = [self._inside.gather(same, position) for same in by_host]
            return [one for found in gathered if found is not None for one in found] or None

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        self.check_root(root)
        host, position = self._layout.place(root)
        with self._collective(Header.of_tensor("broadcast", self._sequence + 1, tensor, root)):
            if self._between.rank == host and position > 0:
                self._inside.broadcast(tensor, position)
            if self._inside.rank == 0:
                self._between.broadcast(tensor, host)
            # Also where the tensor is already: nobody returns before the hosts have agreed.
            self._inside.broadcast(tensor)

    def barrier(self) -> None:
        with self._collective(Header("barrier", self._sequence + 1)):
            self._inside.barrier()
            if self._inside.rank == 0:
                self._between.barrier()
            self._inside.barrier()

    def allocate(self, num_bytes: int) -> Tensor:
        return self._inside.allocate(num_bytes)

    def set_timeout(self, seconds: float) -> None:
        # Later inside, as it was: the watch, which sees all hosts, is the first to say who is late.
        grace = (self._inside.timeout_seconds or 0) - (self.timeout_seconds or 0)
        self._inside.set_timeout(seconds + grace)
        self._between.set_timeout(seconds)

    def check_health(self) -> None:
        self._watch.check_health()

    def close(self) -> None:
        # First, so that others who see this rank leave know why.
        self._watch.close()
        self._inside.close()
        self._between.close()

    @contextmanager
    def _collective(self, header: Header, *, agrees: bool = True) -> Iterator[None]:
        """Surrounds a collective, which begins with a look at whether the ranks of a host agree."""
        self._sequence += 1
        with self._watch.collective(header):
            try:
                if agrees:
                    # The parts below see flat tensors, of a wider dtype, and could not tell whether
                    # ranks call the same. Whether the hosts agree is found out where they meet: the
                    # first ranks, at least, do so in every collective.
                    self._check(header, self._inside.lead(header.encode()))
                yield
            except CommunicationError as error:
                # What `between` raises has gone through the watch, which knows all ranks.
                is_known = error is self._watch.failure
                here = self._layout.hosts[self._between.rank]
                # Told before the others see this rank leave, so that they know why.
                known = self._watch.published(error if is_known else named_globally(error, here))
                self._inside.close()
                self._between.close()
                raise known from error

    def _check(self, header: Header, encoded: Sequence[bytes] | None) -> None:
        """Raises unless the ranks of this host call the same; None says that they do."""
        if encoded is None:
            return
        try:
            check_encoded(header, encoded, self._layout.hosts[self._between.rank])
        except UnequalCollectivesError as error:
            raise self._watch.published(error) from None


def _chunk_length(term: Tensor) -> int:
    num_bytes = min(max(term.nbytes // _CHUNKS, _LEAST_CHUNK_BYTES), _MOST_CHUNK_BYTES)
    return max(1, num_bytes // term.itemsize)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
