"""A process that reduces through our communicators and through torch.distributed, on request.

unisono              a plain tensor
unisono in place     a tensor that lives in memory of `communicator.allocate`
unisono TCP          both through the implementation `TCP`, between hosts
Gloo                 `torch.distributed.all_reduce` of a plain tensor
DDP bucket           what DDP's reducer does with gradients: divides them into flat buckets of
                     25 MB, reduces all buckets at the same time over Gloo, copies them back
floor                no rank waits for another: each reads and writes all its bytes once, which
                     is as much as all ranks together must read and write at least
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore

from unisono.communicators.communicator import Communicator
from unisono.communicators.connect import connect
from unisono.options import CommunicationImplementation as Implementation
from unisono.options import ReduceOp
from unisono_tools.benchmarks.peers.turns import Competitor, mean_factor, serve, sum_factor
from unisono_tools.namespaces import enter

DEADLINE_S = 120.0
BUCKET_BYTES = 25 << 20
# Asked before anybody is bound.
_CORES = frozenset(os.sched_getaffinity(0))


def work(
    rank: int,
    size: int,
    pipe: Connection,
    address: tuple[str, int],
    max_bytes: int,
    hosts: list[str],
    *,
    bind: bool,
) -> None:
    """Joins the others, and answers commands until the end.

    Args:
        rank: Which rank this is.
        size: How many there are.
        pipe: Where commands come from.
        address: Of the store where the ranks meet.
        max_bytes: The most that will be reduced.
        hosts: The network namespaces among which ranks are shared out, if any.
        bind: Whether a rank keeps to one core in our turns.
    """
    if hosts:
        enter(hosts[rank * len(hosts) // size])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0" if hosts else "lo"
    torch.set_num_threads(1)
    limit = timedelta(seconds=DEADLINE_S)
    store = TCPStore(*address, timeout=limit, wait_for_workers=False)
    distributed.init_process_group(
        "gloo", store=PrefixStore("gloo", store), rank=rank, world_size=size, timeout=limit
    )
    # Between hosts the engines are compared; on one host both would be shared memory.
    engines = {"unisono": Implementation.AUTO}
    if hosts:
        engines["unisono TCP"] = Implementation.TCP
    plain = torch.empty(max_bytes, dtype=torch.uint8)
    with ExitStack() as stack:
        ours = {
            name: stack.enter_context(
                connect(
                    PrefixStore(name, store),
                    rank,
                    size,
                    timeout_seconds=DEADLINE_S,
                    implementation=implementation,
                )
            )
            for name, implementation in engines.items()
        }
        arenas = {name: one.allocate(max_bytes) for name, one in ours.items()}

        def prepare(num_bytes: int) -> dict[str, Competitor]:
            tensors = {
                name: [memory[:num_bytes].view(torch.float32) for memory in (plain, arena)]
                for name, arena in arenas.items()
            }
            return _competitors(ours, tensors, has_floor=not hosts, bind=bind)

        with suppress(EOFError):  # The benchmark is gone.
            serve(pipe, rank, prepare, ours["unisono"].barrier)
    distributed.destroy_process_group()


def _competitors(
    ours: Mapping[str, Communicator],
    tensors: Mapping[str, list[Tensor]],
    *,
    has_floor: bool,
    bind: bool,
) -> dict[str, Competitor]:
    rank, size = ours["unisono"].rank, ours["unisono"].size
    total, mean = sum_factor(size), mean_factor(size)
    op = ReduceOp.SUM
    every = _CORES
    # Gloo works in a second thread, and is slower where both have one core.
    own = frozenset([sorted(every)[rank % len(every)]]) if bind else every
    competitors = {
        name + where: Competitor(
            partial(communicator.all_reduce, op, [tensor]), tensor.numpy(), total, own
        )
        for name, communicator in ours.items()
        for where, tensor in zip(("", " in place"), tensors[name], strict=True)
    }
    plain, shared = tensors["unisono"]
    here = plain.numpy()
    competitors["Gloo"] = Competitor(lambda: distributed.all_reduce(plain), here, total, every)
    competitors["DDP bucket"] = Competitor(Buckets(plain, size), here, mean, every)
    if has_floor:
        negated = lambda calls: (rank + 1) * (-1.0) ** calls  # noqa: E731
        competitors["floor"] = Competitor(shared.neg_, shared.numpy(), negated, own)
    return competitors


class Buckets:
    """The way of gradients through DDP, without its backward pass."""

    def __init__(self, gradients: Tensor, size: int) -> None:
        self._parts = gradients.split(BUCKET_BYTES // gradients.itemsize)
        self._buckets = [torch.empty_like(part) for part in self._parts]
        self._factor = 1 / size

    def __call__(self) -> None:
        works = []
        for part, bucket in zip(self._parts, self._buckets, strict=True):
            torch.mul(part, self._factor, out=bucket)
            works.append(distributed.all_reduce(bucket, async_op=True))
        for part, bucket, started in zip(self._parts, self._buckets, works, strict=True):
            started.wait()
            part.copy_(bucket)
