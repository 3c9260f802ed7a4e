"""What torch.distributed can do, written once for any backend."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import Store
from torch.distributed import ReduceOp

LENGTHS = (0, 1, 7)
# What Gloo moves and reduces; the answers for others are those for float64.
GLOO_DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
MORE_DTYPES = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
COMPLEX = (torch.complex64, torch.complex128)
NUMBERS = (*GLOO_DTYPES, *MORE_DTYPES)
EVERY_DTYPE = (torch.bool, *NUMBERS, *COMPLEX)

# torch 2.13 has other names for them.
_calls: Any = distributed
_coalesced: Any = _calls._coalescing_manager
all_gather_single: Any = getattr(_calls, "all_gather_single", _calls.all_gather_into_tensor)
reduce_scatter_single: Any = getattr(_calls, "reduce_scatter_single", _calls.reduce_scatter_tensor)


class World(NamedTuple):
    """Where a case runs: the group, and its rank and size."""

    group: Any
    rank: int
    size: int

    def brought(self, length: int, dtype: torch.dtype, of: int | None = None) -> Tensor:
        """Small numbers, so that every dtype holds their sums and products in any order."""
        rank = self.rank if of is None else of
        return ((torch.arange(length) + rank) % 3 + rank % 2).to(dtype)


Case = Callable[[World, int, torch.dtype], Sequence[Tensor]]


@contextmanager
def joined(store: Store, rank: int, size: int, timeout: float = 30) -> Iterator[None]:
    """The default group over "unisono", while it lasts."""
    # Names that torch has deprecated are still in use.
    warnings.simplefilter("ignore", FutureWarning)
    distributed.init_process_group(
        "unisono", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


def all_reduce(op: Any, *, later: bool = False) -> Case:
    def case(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
        tensor = world.brought(length, dtype)
        work = distributed.all_reduce(tensor, op, group=world.group, async_op=later)
        if work is not None:
            work.wait()
            assert work.is_completed()
            assert work.get_future().wait()[0] is not None
        return [tensor]

    return case


def all_reduce_strided(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    rows = world.brought(6 * length, dtype).view(2, 3, length)
    distributed.all_reduce(rows.transpose(0, 2), group=world.group)
    return [rows]


def all_reduce_sparse(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    # Each rank has another number of rows, and some rows are there twice.
    indices = world.brought(length + world.rank, torch.int64)
    values = torch.ones(length + world.rank, 2, dtype=dtype)
    tensor = torch.sparse_coo_tensor(indices[None], values, (5, 2), check_invariants=True)
    distributed.all_reduce(tensor, group=world.group)
    return [tensor.to_dense()]


def all_reduce_many(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    tensors = [world.brought(length + more, dtype) for more in range(3)]
    works = [distributed.all_reduce(t, group=world.group, async_op=True) for t in tensors[:2]]
    distributed.all_reduce(tensors[2], group=world.group)
    for work in works:
        work.wait()
    return tensors


def all_reduce_coalesced(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    tensors = [world.brought(length, dtype), world.brought(length + 2, dtype)]
    with _coalesced(group=world.group):
        for tensor in tensors:
            distributed.all_reduce(tensor, group=world.group)
    return tensors


def reduce(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    tensor = world.brought(length, dtype)
    distributed.reduce(tensor, world.size - 1, group=world.group)
    return [tensor] if world.rank == world.size - 1 else []


def broadcast(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    tensor = world.brought(length, dtype).requires_grad_(dtype.is_floating_point)
    distributed.broadcast(tensor, world.size - 1, group=world.group)
    return [tensor.detach()]


def all_gather(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    outputs = [torch.zeros(length, dtype=dtype) for _ in range(world.size)]
    distributed.all_gather(outputs, world.brought(length, dtype), group=world.group)
    return outputs


def all_gather_one(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    output = torch.zeros(world.size * length, dtype=dtype)
    all_gather_single(output, world.brought(length, dtype), group=world.group)
    return [output]


def all_gather_one_coalesced(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    outputs = [torch.zeros(world.size * length, dtype=dtype) for _ in range(2)]
    with _coalesced(group=world.group):
        for output in outputs:
            all_gather_single(output, world.brought(length, dtype), group=world.group)
    return outputs


def gather(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    outputs = [torch.zeros(length, dtype=dtype) for _ in range(world.size)]
    is_root = world.rank == world.size - 1
    own = world.brought(length, dtype)
    distributed.gather(own, outputs if is_root else None, world.size - 1, group=world.group)
    return outputs


def scatter(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    output = torch.zeros(length, dtype=dtype)
    parts = [world.brought(length, dtype, of=rank) for rank in range(world.size)]
    distributed.scatter(output, parts if world.rank == 0 else None, 0, group=world.group)
    return [output]


def reduce_scatter(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    ranks = range(world.size)
    inputs = [world.brought(length, dtype, of=world.rank + rank) for rank in ranks]
    output = torch.zeros(length, dtype=dtype)
    distributed.reduce_scatter(output, inputs, group=world.group)
    return [output, *inputs]


def reduce_scatter_one(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    whole = world.brought(world.size * length, dtype)
    output = torch.zeros(length, dtype=dtype)
    reduce_scatter_single(output, whole, group=world.group)
    return [output, whole]


def reduce_scatter_one_coalesced(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    outputs = [torch.zeros(length, dtype=dtype) for _ in range(2)]
    with _coalesced(group=world.group):
        for output in outputs:
            whole = world.brought(world.size * length, dtype)
            reduce_scatter_single(output, whole, group=world.group)
    return outputs


def all_to_all(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    lengths = [length + rank for rank in range(world.size)]
    own = world.brought(sum(lengths), dtype)
    output = torch.zeros(world.size * lengths[world.rank], dtype=dtype)
    received = [lengths[world.rank]] * world.size
    distributed.all_to_all_single(output, own, received, lengths, group=world.group)
    return [output]


def send_around(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    if world.size == 1:
        return []
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    sent = distributed.isend(world.brought(length, dtype), group=world.group, group_dst=after)
    output = torch.zeros(length, dtype=dtype)
    distributed.recv(output, group=world.group, group_src=before)
    assert sent is not None
    sent.wait()
    return [output]


def all_to_all_lists(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    parts = [world.brought(length, dtype, of=world.rank + rank) for rank in range(world.size)]
    outputs = [torch.zeros(length, dtype=dtype) for _ in range(world.size)]
    distributed.all_to_all(outputs, parts, group=world.group)
    return outputs


def all_gather_lists(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    own = [world.brought(length, dtype), world.brought(length + 2, dtype)]
    outputs = [[torch.zeros_like(one) for one in own] for _ in range(world.size)]
    _calls.all_gather_coalesced(outputs, own, group=world.group)
    return [tensor for row in outputs for tensor in row]


def receive_from_any(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    """The first rank hears all others, in the order in which they come."""
    # From any rank Gloo does not receive what is empty.
    length += 1
    if world.rank > 0:
        distributed.send(world.brought(length, dtype), group=world.group, group_dst=0, tag=5)
        return []
    heard: dict[int, Tensor] = {}
    for _ in range(world.size - 1):
        output = torch.zeros(length, dtype=dtype)
        source = distributed.recv(output, group=world.group, tag=5)
        heard[source] = output
    return [heard[source] for source in sorted(heard)]


def batch_of_messages(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    if world.size == 1:
        return []
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    output = torch.zeros(length, dtype=dtype)
    messages = [
        distributed.P2POp(distributed.irecv, output, group=world.group, group_peer=before),
        distributed.P2POp(
            distributed.isend, world.brought(length, dtype), group=world.group, group_peer=after
        ),
    ]
    for work in distributed.batch_isend_irecv(messages):
        work.wait()
    return [output]


def objects(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    last = world.size - 1
    gathered: list[Any] = [None] * world.size
    is_last = world.rank == last
    own = {"rank": world.rank, "values": world.brought(length, dtype).tolist()}
    distributed.gather_object(own, gathered if is_last else None, last, group=world.group)
    told = [own]
    distributed.broadcast_object_list(told, last, group=world.group)
    given: list[Any] = [None]
    parts = list(range(world.size)) if is_last else None
    distributed.scatter_object_list(given, parts, last, group=world.group)
    ranks = [one["rank"] for one in gathered if one is not None]
    return [torch.tensor([*ranks, told[0]["rank"], *given]).to(dtype)]


def methods(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    """The methods of a group, called in the short ways that torch lets programs use."""
    group: Any = world.group or distributed.group.WORLD
    largest, first, total = (world.brought(length, dtype) for _ in range(3))
    group.allreduce(largest, ReduceOp.MAX).wait()
    group.allreduce([largest], op=ReduceOp.SUM).wait()
    group.broadcast(first, root=0).wait()
    group.reduce(total, 0, ReduceOp.SUM).wait()
    gathered = [torch.zeros(length, dtype=dtype) for _ in range(world.size)]
    group.allgather(gathered, world.brought(length, dtype)).wait()
    part = torch.zeros(length, dtype=dtype)
    group.reduce_scatter(part, gathered, ReduceOp.SUM).wait()
    group.barrier().wait()
    key = f"{group.name()} was here"
    group.get_group_store().set(key, "yes")
    assert group.get_group_store().get(key) == b"yes"
    return [largest, first, *([total] if world.rank == 0 else []), *gathered, part]


def barrier(world: World, length: int, dtype: torch.dtype) -> Sequence[Tensor]:
    distributed.barrier(group=world.group)
    work = distributed.barrier(group=world.group, async_op=True)
    work.wait()
    return []


CASES: list[tuple[str, Case, Sequence[torch.dtype]]] = [
    ("sum", all_reduce(ReduceOp.SUM), (*NUMBERS, *COMPLEX)),
    ("sum later", all_reduce(ReduceOp.SUM, later=True), (*NUMBERS, *COMPLEX)),
    ("mean", all_reduce(ReduceOp.AVG), (torch.float32, torch.float64)),
    ("least", all_reduce(ReduceOp.MIN), NUMBERS),
    ("greatest", all_reduce(ReduceOp.MAX), NUMBERS),
    ("product", all_reduce(ReduceOp.PRODUCT), NUMBERS),
    ("and", all_reduce(ReduceOp.BAND), INTEGERS),
    ("or", all_reduce(ReduceOp.BOR), INTEGERS),
    ("exclusive or", all_reduce(ReduceOp.BXOR), INTEGERS),
    ("logical sum", all_reduce(ReduceOp.SUM), (torch.bool,)),
    ("strided", all_reduce_strided, (torch.float32,)),
    ("sparse", all_reduce_sparse, (torch.float32, torch.int64)),
    ("many", all_reduce_many, (torch.float32,)),
    ("coalesced", all_reduce_coalesced, (torch.float32,)),
    ("reduce", reduce, NUMBERS),
    ("broadcast", broadcast, EVERY_DTYPE),
    ("all_gather", all_gather, EVERY_DTYPE),
    ("all_gather_single", all_gather_one, EVERY_DTYPE),
    ("all_gather_single coalesced", all_gather_one_coalesced, (torch.float32,)),
    ("gather", gather, GLOO_DTYPES),
    ("scatter", scatter, GLOO_DTYPES),
    ("reduce_scatter", reduce_scatter, NUMBERS),
    ("reduce_scatter_single", reduce_scatter_one, NUMBERS),
    ("reduce_scatter_single coalesced", reduce_scatter_one_coalesced, (torch.float32,)),
    ("all_to_all_single", all_to_all, GLOO_DTYPES),
    ("all_to_all", all_to_all_lists, (torch.float32,)),
    ("all_gather_coalesced", all_gather_lists, (torch.float32,)),
    ("send and recv", send_around, GLOO_DTYPES),
    ("recv from any", receive_from_any, (torch.float32,)),
    ("batch_isend_irecv", batch_of_messages, (torch.float32,)),
    ("objects", objects, (torch.float32,)),
    ("methods of the group", methods, (torch.float32,)),
    ("barrier", barrier, (torch.float32,)),
]
