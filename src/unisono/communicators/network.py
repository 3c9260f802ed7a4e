"""Ranks anywhere, over TCP or a process group of torch.distributed, Gloo or MPI.

Every collective begins with one exchange in which each rank sends each other what it calls, a
`Header`, and as much of its data as fits beside. So ranks that do not agree find out before
anything is mixed up, small collectives take one step, and sizes may differ.

                       steps   bytes sent, for n bytes on each of P ranks
    all_reduce  small  1       (P - 1) n             everybody gets all terms and adds them up
                large  2 or 3  2 (P - 1) / P n       parts to their ranks, sums back to all
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from unisono.communicators.communicator import Communicator
from unisono.communicators.exchange import Exchange, as_bytes
from unisono.communicators.gloo import make_gloo_group, make_mpi_group
from unisono.communicators.headers import Header
from unisono.communicators.joining import join_mesh
from unisono.communicators.pieces import Pieces, lengths_of
from unisono.communicators.stores import DEFAULT_TIMEOUT_SECONDS, Countdown, say_to_all
from unisono.communicators.sums import combine_into
from unisono.communicators.transport import ProcessGroupTransport, Transport
from unisono.communicators.watch import Watch
from unisono.costs import STEP_BYTES, one_step_pays
from unisono.errors import JobMismatchError, UnsupportedError
from unisono.options import ReduceOp

# What may travel beside a header. Below, another step costs more than a copy.
_ROOM_BYTES = 1 << 20
# What the rooms for all ranks may take together, but for very many ranks.
_ALL_ROOMS_BYTES = 16 << 20
_LEAST_ROOM_BYTES = 64 << 10
# Up to here a further copy costs less than a further step.
_COPIED_BYTES = 512 << 10

# The words for each backend.
_NAMES = {
    "tcp": "TCP",
    "gloo": "torch.distributed with gloo",
    "mpi": "torch.distributed with mpi",
}


class NetworkCommunicator(Communicator):
    """Collectives in host memory, over connections or a process group of their own.

    Args:
        store: Where the ranks meet. One store, or one prefix of it, serves one communicator.
        rank: Which rank this is.
        size: How many there are, at least two.
        backend: "tcp", "gloo", or "mpi" where torch was built with it.
        timeout_seconds: How long a collective may wait for others.
        host: The address that other ranks reach this one by; found out if not given.
        watch: The watch over a larger communicator of which this one is a part.
        speaks_for: For each rank of this part, those of the larger communicator that have agreed
            with it on what they call.
        ranks: For each rank of this part, its number in the larger communicator.
        beside_header: How many bytes may travel with a header, a multiple of 16; chosen if not
            given. MPI allows none.
        step_bytes: How many bytes more one step may send than two.
        joining_seconds: How long to wait for the others here; `timeout_seconds` if not given.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        backend: str = "tcp",
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        host: str | None = None,
        watch: Watch | None = None,
        speaks_for: Sequence[Sequence[int]] | None = None,
        ranks: Sequence[int] | None = None,
        beside_header: int | None = None,
        step_bytes: int = STEP_BYTES,
        joining_seconds: float | None = None,
    ) -> None:
        super().__init__(rank, size)
        self.timeout_seconds = timeout_seconds
        self._backend = backend
        self._step_bytes = step_bytes
        patience = timeout_seconds if joining_seconds is None else joining_seconds
        left = Countdown(patience)
        transport = _make_transport(store, rank, size, backend, host, timeout_seconds, left)
        room = beside_header
        if room is None:
            room = min(_ROOM_BYTES, max(_ALL_ROOMS_BYTES // size, _LEAST_ROOM_BYTES))
        try:
            own_watch = watch or Watch(
                PrefixStore("watch", store),
                rank,
                size,
                timeout_seconds=timeout_seconds,
                host=host,
                joining_seconds=left.seconds(),
            )
        except BaseException:
            transport.close(has_failed=True)
            raise
        self._exchange = Exchange(
            transport,
            own_watch,
            owns_watch=watch is None,
            room=0 if backend == "mpi" else room,
            speaks_for=speaks_for or [[one] for one in range(size)],
            ranks=ranks or range(size),
        )
        self._pieces = Pieces(self._exchange)

    @property
    def name(self) -> str:
        """In words, what carries the collectives."""
        return _NAMES[self._backend]

    def takes(self, device: torch.device) -> bool:
        """Host memory."""
        return device.type == "cpu"

    def all_reduce(self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None) -> None:
        """Combines all terms of all ranks into the first term of each rank."""
        header = Header.of_terms("all_reduce", self._next(), op, terms, count)
        flat = [term.detach().view(-1) for term in terms]
        with self._exchange.collective(header):
            if self._is_small(flat):
                combine_into(op, self._exchange_terms(header, flat), flat[:1], count)
            elif self._parts_pay(flat):
                parts = self._exchange_parts(header, flat)
                self._pieces.begin_to_share(op, flat[0], parts, count)()
            else:
                met = self._exchange.begin_to_meet(header, [None] * self.size)
                for _ in self._pieces.reduced(op, self._pieces.of(flat), count, met):
                    pass

    def all_reduce_pieces(
        self, op: ReduceOp, pieces: Iterable[Tensor], count: int | None = None
    ) -> Iterator[Tensor]:
        """Combines flat tensors as `all_reduce` does, one after the other, and yields each then.

        While the next ones are made, the last ones are under way. All ranks bring as many, and no
        others call this at the same time.
        """
        header = Header("all_reduce", self._next(), op, count=count)
        with self._exchange.collective(header):
            met = self._exchange.begin_to_meet(header, [None] * self.size)
            yield from self._pieces.reduced(op, ([piece] for piece in pieces), count, met)

    def reduce_scatter(
        self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None
    ) -> Tensor:
        """Combines all terms, and returns the part of this rank in the flattened result."""
        header = Header.of_terms("reduce_scatter", self._next(), op, terms, count)
        flat = [term.detach().view(-1) for term in terms]
        with self._exchange.collective(header):
            total = flat[0].new_empty(lengths_of(len(flat[0]), self.size)[self.rank])
            combine_into(op, self._exchange_parts(header, flat), [total], count)
            return total

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, by rank."""
        own = tensor.detach().contiguous()
        header = Header.of_tensor("all_gather", self._next(), own)
        with self._exchange.collective(header):
            payload = as_bytes(own) if self._exchange.fits(own) else None
            headers, data = self._exchange.meet(header, [payload] * self.size)
            gathered = self._unpack(headers, data, own)
            large = {i: t for i, t in enumerate(gathered) if not self._exchange.fits(t)}
            self._exchange.broadcast(large)
            return gathered

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        """Returns the tensors of all ranks on `root`, and None elsewhere."""
        self.check_root(root)
        own = tensor.detach().contiguous()
        header = Header.of_tensor("gather", self._next(), own, root)
        with self._exchange.collective(header):
            payloads: list[Tensor | None] = [None] * self.size
            payloads[root] = as_bytes(own) if self._exchange.fits(own) else None
            headers, data = self._exchange.meet(header, payloads)
            sizes = [own.new_empty(h.shape, device="meta") for h in headers]
            large = [0 if self._exchange.fits(t) else t.numel() for t in sizes]
            if self.rank != root:
                if any(large):
                    self._send_large(own, large, root)
                return None
            gathered = self._unpack(headers, data, own)
            if any(large):
                self._receive_large(own, large, gathered)
            return gathered

    def all_to_all(self, tensor: Tensor) -> list[Tensor]:
        """Gives every rank its part of a tensor, and returns this rank's part of each, by rank."""
        own = tensor.detach().contiguous()
        header = Header.of_tensor("all_to_all", self._next(), own)
        with self._exchange.collective(header):
            # What came beside headers lies where the next headers come.
            return [part.clone() for part in self._exchange_parts(header, [own.view(-1)])]

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Overwrites the contiguous `tensor` with that of `root`."""
        self.check_root(root)
        header = Header.of_tensor("broadcast", self._next(), tensor, root)
        raw = as_bytes(tensor)
        with self._exchange.collective(header):
            is_small = self._exchange.fits(raw)
            payload = raw if is_small and self.rank == root else None
            _, data = self._exchange.meet(header, [payload] * self.size)
            if not is_small:
                self._exchange.broadcast({root: raw})
            elif self.rank != root:
                raw.copy_(data[root][: len(raw)])

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        header = Header("barrier", self._next())
        with self._exchange.collective(header):
            self._exchange.meet(header, [None] * self.size)

    def set_timeout(self, seconds: float) -> None:
        """Says how long collectives may wait for others from now on."""
        self._exchange.set_timeout(seconds)

    def check_health(self) -> None:
        """Raises a `CommunicationError` if a rank is lost. Other ranks need not call it."""
        self._exchange.watch.check_health()

    def close(self) -> None:
        """Leaves, and gives back memory, connections and threads. May be called twice."""
        self._exchange.close()

    def _next(self) -> int:
        return self._exchange.sequence + 1

    def _is_small(self, terms: list[Tensor]) -> bool:
        num_bytes = sum(term.nbytes for term in terms)
        fits = num_bytes <= self._exchange.room
        return fits and one_step_pays(self.size, num_bytes, self._step_bytes)

    def _exchange_terms(self, header: Header, terms: list[Tensor]) -> list[Tensor]:
        """Sends all terms to everybody, and returns the terms of all ranks in order."""
        raw = as_bytes(torch.cat(terms))
        _, data = self._exchange.meet(header, [raw] * self.size)
        data[self.rank] = raw
        return _cut(data, terms)

    def _parts_pay(self, terms: Sequence[Tensor]) -> bool:
        """Whether parts had better travel beside the header, for which they are copied."""
        num_bytes = sum(term.nbytes for term in terms)
        return self.size > 2 and num_bytes <= _COPIED_BYTES and self._fits_in_parts(terms)

    def _fits_in_parts(self, terms: Sequence[Tensor]) -> bool:
        # All ranks must decide alike, so the longest part decides.
        longest = max(lengths_of(len(terms[0]), self.size))
        return longest * len(terms) * terms[0].itemsize <= self._exchange.room

    def _exchange_parts(self, header: Header, terms: list[Tensor]) -> list[Tensor]:
        """Sends every rank its part of each term, and returns this rank's parts in order."""
        if not self._fits_in_parts(terms):
            self._exchange.meet(header, [None] * self.size)
            return self._pieces.send_parts(terms, None)()
        lengths = lengths_of(len(terms[0]), self.size)
        by_rank = list(zip(*(term.split(lengths) for term in terms), strict=True))
        payloads = [as_bytes(torch.cat(parts)) for parts in by_rank]
        _, data = self._exchange.meet(header, payloads)
        data[self.rank] = payloads[self.rank]
        return _cut(data, by_rank[self.rank])

    def _unpack(self, headers: list[Header], data: list[Tensor], own: Tensor) -> list[Tensor]:
        """Returns the tensors that came beside headers, and room for those that did not."""
        tensors = [own.new_empty(header.shape) for header in headers]
        for rank, tensor in enumerate(tensors):
            if rank == self.rank:
                tensor.copy_(own)
            elif self._exchange.fits(tensor):
                as_bytes(tensor).copy_(data[rank][: tensor.nbytes])
        return tensors

    def _send_large(self, own: Tensor, lengths: list[int], root: int) -> None:
        sent = [lengths[self.rank] if rank == root else 0 for rank in range(self.size)]
        nothing = own.new_empty(0)
        self._exchange.all_to_all(nothing, [0] * self.size, own.view(-1)[: sum(sent)], sent)()

    def _receive_large(self, own: Tensor, lengths: list[int], gathered: list[Tensor]) -> None:
        received = [0 if rank == self.rank else n for rank, n in enumerate(lengths)]
        room = own.new_empty(sum(received))
        self._exchange.all_to_all(room, received, own.new_empty(0), [0] * self.size)()
        for tensor, part in zip(gathered, room.split(received), strict=True):
            if len(part):
                tensor.view(-1).copy_(part)


def _make_transport(
    store: Store,
    rank: int,
    size: int,
    backend: str,
    host: str | None,
    timeout_seconds: float,
    left: Countdown,
) -> Transport:
    if backend not in _NAMES:
        raise UnsupportedError(
            f"`backend` must be one of {', '.join(map(repr, _NAMES))}, got {backend!r}. For NCCL "
            "use `NcclCommunicator`."
        )
    said = say_to_all(
        PrefixStore("backend", store), rank, size, backend, timeout_seconds=left.seconds()
    )
    if odd := [other for other, text in enumerate(said) if text != backend]:
        raise JobMismatchError(
            f"All ranks must use one backend, got {said} by rank. Set it for all alike.", odd
        )
    if backend == "mpi":
        return ProcessGroupTransport(make_mpi_group(rank, size))
    make = make_gloo_group if backend == "gloo" else join_mesh
    made = make(
        store,
        rank,
        size,
        host=host,
        timeout_seconds=timeout_seconds,
        joining_seconds=left.seconds(),
    )
    return ProcessGroupTransport(made) if backend == "gloo" else made


def _cut(data: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Cuts the bytes of each rank into tensors of the dtype and lengths of `like`."""
    terms, length, dtype = len(like), len(like[0]), like[0].dtype
    whole = [raw[: terms * length * dtype.itemsize].view(dtype) for raw in data]
    return [term for one in whole for term in one.view(terms, length).unbind()]
