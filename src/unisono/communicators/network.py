"""Ranks anywhere, over TCP, Gloo or MPI.

Which algorithm runs depends on the size of a tensor, and on what the link costs:

               steps         bytes sent, for n bytes on each of P ranks
    one step   1             (P - 1) n          small tensors, few ranks
    doubling   log2 P        about n log2 P     small tensors, many ranks
    exchange   2             2 (P - 1) / P n    large tensors
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from unisono.algorithms.rounds import Rounds, exchange
from unisono.communicators.choice import Engine
from unisono.communicators.communicator import Communicator, slice_of
from unisono.communicators.executor import Executor, pieces_of
from unisono.communicators.gloo import GlooMaker, make_gloo_group
from unisono.communicators.gloo_transport import GlooTransport
from unisono.communicators.headers import Header
from unisono.communicators.joining import join_mesh
from unisono.communicators.link import Collective, Link, Part
from unisono.communicators.mpi import make_mpi_communicator
from unisono.communicators.mpi_transport import MpiTransport
from unisono.communicators.plan import Plan
from unisono.communicators.stores import DEFAULT_TIMEOUT_SECONDS, Countdown
from unisono.communicators.transport import Transport
from unisono.communicators.watch import make_watch
from unisono.costs import SMALL_BYTES, USUAL_LINK, fastest_flat, rounds_of
from unisono.costs import Link as Constants
from unisono.options import ReduceOp


class NetworkCommunicator(Communicator):
    """Collectives in host memory, over a transport.

    Args:
        part: Where these ranks are some of a larger communicator, which has a watch over all.
        gloo: See `connect`.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        backend: str = "gloo",
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        part: Part | None = None,
        packed_bytes: int | None = None,
        constants: Constants = USUAL_LINK,
        joining_seconds: float | None = None,
        gloo: GlooMaker | None = None,
    ) -> None:
        super().__init__(rank, size)
        self.timeout_seconds = timeout_seconds
        self._constants = constants
        left = Countdown(timeout_seconds if joining_seconds is None else joining_seconds)
        owns_watch, engine = part is None, Engine(backend)
        with ExitStack() as stack:
            if part is None:
                watch, group = make_watch(
                    PrefixStore("watch", store),
                    rank,
                    size,
                    gloo if engine is Engine.GLOO else None,
                    timeout_seconds=timeout_seconds,
                    joining_seconds=left.seconds(),
                )
                stack.callback(watch.close)
                part = Part(watch, range(size), [[one] for one in range(size)], group)
            transport = _make_transport(store, rank, size, engine, part, left.seconds())
            stack.pop_all()
        self._link = Link(transport, part, owns_watch=owns_watch, packed_bytes=packed_bytes)
        self.name = transport.name
        self._executor = functools.lru_cache(maxsize=64)(self._make_executor)
        self._plan = functools.lru_cache(maxsize=32)(self._make_plan)

    def all_reduce(self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None) -> None:
        header = Header.of_terms("all_reduce", self._next(), op, terms, count)
        flat = [term.detach().view(-1) for term in terms]
        num_bytes = len(flat) * flat[0].nbytes
        if num_bytes <= SMALL_BYTES:
            plan = self._plan(op, (flat[0].dtype, len(flat[0]), len(flat)), count)
            if plan.is_small:
                with self._link.collective(header) as collective:
                    plan.run(collective, flat)
                return
        name = fastest_flat(self.size, num_bytes, self._constants)
        # Two ranks swap all they have, which is as much as parts and sums, in one step.
        is_large = name == "exchange" or self.size == 2
        pieces = pieces_of(flat, self.size) if is_large else [flat]
        with self._link.collective(header) as collective:
            self._executor(name, len(flat)).run_all(collective, op, pieces, count)

    def all_reduce_pieces(
        self, op: ReduceOp, pieces: Iterable[Tensor], count: int | None = None
    ) -> Iterator[Tensor]:
        """Combines flat tensors as `all_reduce` does, one after the other, and yields each then.

        While the next ones are made, the last ones are under way. All ranks bring the same
        number, and only one thread calls this at a time.
        """
        header = Header("all_reduce", self._next(), op, count=count)
        executor = self._executor("one step" if self.size == 2 else "exchange", 1)
        with self._link.collective(header) as collective:
            yield from executor.run(collective, op, ([piece] for piece in pieces), count)

    def reduce_scatter(
        self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None
    ) -> Tensor:
        header = Header.of_terms("reduce_scatter", self._next(), op, terms, count)
        flat = [term.detach().view(-1) for term in terms]
        executor = self._executor("reduce_scatter", len(terms))
        total = torch.empty_like(flat[0])
        with self._link.collective(header) as collective:
            executor.run_all(collective, op, [flat], count, total)
        return self._own_part(total)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        self.check_root(root)
        header = Header.of_tensor("broadcast", self._next(), tensor, root)
        flat = tensor.detach().view(-1)
        name = fastest_flat(self.size, flat.nbytes, self._constants)
        with self._link.collective(header) as collective:
            self._executor(name, 1, root).run_all(collective, ReduceOp.SUM, [[flat]])

    def barrier(self) -> None:
        header = Header("barrier", self._next())
        name = fastest_flat(self.size, 0, self._constants)
        with self._link.collective(header) as collective:
            self._executor(name, 1).run_all(collective, ReduceOp.SUM, [[torch.empty(0)]])

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        own = tensor.detach().contiguous()
        with self._link.collective(Header.of_tensor("all_gather", self._next(), own)) as collective:
            return self._gathered(collective, own, range(self.size))

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        self.check_root(root)
        own = tensor.detach().contiguous()
        header = Header.of_tensor("gather", self._next(), own, root)
        with self._link.collective(header) as collective:
            gathered = self._gathered(collective, own, [root])
            return gathered if self.rank == root else None

    def _gathered(
        self, collective: Collective, own: Tensor, receivers: Sequence[int]
    ) -> list[Tensor]:
        """Sends this rank's tensor to `receivers`, which get those of all ranks."""
        peers = [rank for rank in range(self.size) if rank != self.rank]
        received = [collective.receive(peer, []) for peer in peers]
        given = {peer: [own] if peer in receivers else [] for peer in peers}
        sent = [one for pair in given.items() for one in collective.send(*pair)]
        collective.link.push()
        collective.hear(received)
        gathered = [own] * self.size
        if self.rank in receivers:
            gathered = [own.new_empty(collective.headers[rank].shape) for rank in range(self.size)]
            gathered[self.rank].copy_(own)
            for one in received:
                one.tensors = [gathered[one.peer]]
        collective.open(received)
        collective.finish(sent, received)
        return gathered

    def all_to_all(self, tensor: Tensor) -> list[Tensor]:
        own = tensor.detach().contiguous()
        flat = own.view(-1)
        parts = [flat[slice_of(rank, self.size, len(flat))] for rank in range(self.size)]
        found = [torch.empty_like(parts[self.rank]) for _ in parts]
        peers = [rank for rank in range(self.size) if rank != self.rank]
        with self._link.collective(Header.of_tensor("all_to_all", self._next(), own)) as collective:
            received = [collective.receive(peer, [found[peer]]) for peer in peers]
            sent = [one for peer in peers for one in collective.send(peer, [parts[peer]])]
            collective.meet(received)
            collective.finish(sent, received)
        found[self.rank].copy_(parts[self.rank])
        return found

    def set_timeout(self, seconds: float) -> None:
        self._link.set_timeout(seconds)

    def check_health(self) -> None:
        self._link.watch.check_health()

    def close(self) -> None:
        self._link.close()

    def _next(self) -> int:
        return self._link.sequence + 1

    def _make_plan(
        self, op: ReduceOp, like: tuple[torch.dtype, int, int], count: int | None
    ) -> Plan:
        dtype, length, num_terms = like
        num_bytes = num_terms * length * dtype.itemsize
        name = fastest_flat(self.size, num_bytes, self._constants)
        return Plan(self._make_executor(name, num_terms), self._link, op, like, count)

    def _make_executor(self, name: str, num_terms: int, root: int | None = None) -> Executor:
        if name == "reduce_scatter":
            rounds = exchange(self.size)
            first = Rounds(self.size, rounds.rounds[:1], rounds.num_parts)
            return Executor(first, self.rank, num_terms, results=[self.rank])
        return Executor(rounds_of(name, self.size), self.rank, num_terms, root)


def _make_transport(
    store: Store, rank: int, size: int, engine: Engine, part: Part, joining_seconds: float
) -> Transport:
    seconds = part.watch.timeout_seconds
    if engine is Engine.MPI:
        comm = make_mpi_communicator(store, rank, size, timeout_seconds=joining_seconds)
        return MpiTransport(comm, seconds)
    both: Any = {"timeout_seconds": seconds, "joining_seconds": joining_seconds}
    if engine is Engine.TCP:
        return join_mesh(store, rank, size, **both)
    if part.group is not None:
        return GlooTransport(part.group, seconds, part.ranks)
    group = make_gloo_group(store, rank, size, check_health=part.watch.check_health, **both)
    return GlooTransport(group, seconds)
