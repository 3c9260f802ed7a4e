"""Collectives between real processes, through shared memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from processes.harness import run_ranks
from torch import Tensor
from torch._C._distributed_c10d import Store

from unisono.communicators.communicator import Communicator, slice_of
from unisono.communicators.shared_memory import SharedMemoryCommunicator
from unisono.errors import UnsupportedError
from unisono.kernels import divide, native_core, tree_reduce
from unisono.options import ReduceOp

pytestmark = pytest.mark.skipif(
    native_core().kernel is None, reason=f"needs the native core: {native_core().status}"
)

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64]
INTEGERS += [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
ORDERED = (ReduceOp.MIN, ReduceOp.MAX)
# More than a slot holds, in float32.
LARGE = [131_073, 700_001]

Body = Callable[[Communicator], object]


def in_communicator(store: Store, rank: int, size: int, body: Body) -> object:
    with SharedMemoryCommunicator(store, rank, size, timeout_seconds=60) as communicator:
        return body(communicator)


def run(size: int, body: Body) -> list[object]:
    return run_ranks(size, in_communicator, body)


def term(rank: int, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a rank brings; every rank can tell what the others bring."""
    generator = torch.Generator().manual_seed(1000 * rank + index)
    # A prime number of values, again and again: to draw many takes longer than to reduce them.
    length = math.prod(shape)
    values = (torch.randn(997, generator=generator) * 20).repeat(length // 997 + 1)[:length]
    values = values.view(shape)
    if dtype.is_complex:
        return torch.complex(values, values.flip(0) if shape else -values).to(dtype)
    return values.to(dtype) if dtype.is_floating_point else values.to(torch.int64).to(dtype)


def total(op: ReduceOp, terms: list[Tensor], count: int | None) -> Tensor:
    if op is not ReduceOp.MEAN or count is None:
        return tree_reduce(op, terms)
    dtype = terms[0].dtype
    wide = [t.float() if dtype in (torch.float16, torch.bfloat16) else t for t in terms]
    return divide(tree_reduce(ReduceOp.SUM, wide), count, dtype)


def check_reduction(
    communicator: Communicator,
    op: ReduceOp,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    num_terms: int,
    count: int | None = None,
) -> None:
    rank, size = communicator.rank, communicator.size
    terms = [term(r, i, shape, dtype) for r in range(size) for i in range(num_terms)]
    expected = total(op, terms, count)
    for _ in range(2):
        own = [term(rank, i, shape, dtype) for i in range(num_terms)]
        part = communicator.reduce_scatter(op, own, count)
        communicator.all_reduce(op, own, count)
        what = f"{op} of {num_terms} terms {dtype} {shape} over {count} on rank {rank} of {size}"
        assert_same_bits(own[0], expected, what)
        assert_same_bits(part, expected.flatten()[slice_of(rank, size, expected.numel())], what)


def assert_same_bits(result: Tensor, expected: Tensor, what: str) -> None:
    assert result.dtype == expected.dtype, what
    assert result.shape == expected.shape, what
    assert torch.equal(bytes_of(result), bytes_of(expected)), what


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def reduce_every_dtype(communicator: Communicator) -> None:
    for op, dtype in itertools.product(ReduceOp, FLOATS + COMPLEX + INTEGERS):
        if (dtype.is_complex and op in ORDERED) or (op is ReduceOp.MEAN and dtype in INTEGERS):
            continue
        for shape, num_terms in [((37,), 1), ((5, 3), 3)]:
            check_reduction(communicator, op, dtype, shape, num_terms)


def reduce_every_length(communicator: Communicator) -> None:
    for length in [0, 1, 2, 7, 64, 1001, 20_000, *LARGE]:
        for num_terms in [1, 2, 3] if length < 100_000 else [1, 2]:
            check_reduction(communicator, ReduceOp.SUM, torch.float32, (length,), num_terms)
    check_reduction(communicator, ReduceOp.SUM, torch.bfloat16, (600_001,), 2)
    check_reduction(communicator, ReduceOp.SUM, torch.complex64, (200_001,), 1)
    check_reduction(communicator, ReduceOp.MAX, torch.float32, (), 1)


def reduce_means(communicator: Communicator) -> None:
    for dtype, count in itertools.product(FLOATS + COMPLEX, [1, 3, 1000]):
        check_reduction(communicator, ReduceOp.MEAN, dtype, (33,), 1, count)
        check_reduction(communicator, ReduceOp.MEAN, dtype, (70_001,), 2, count)


def move(communicator: Communicator) -> None:
    rank, size = communicator.rank, communicator.size
    dtypes = [*FLOATS, *COMPLEX, *INTEGERS, torch.bool, torch.complex32, torch.float8_e4m3fn]
    shapes: list[tuple[int, ...]] = [(), (0,), (1,), (2, 0, 3), (7, 5)]
    for dtype, shape in [*itertools.product(dtypes, shapes), (torch.float32, (700_001,))]:
        for root in {0, size - 1}:
            everything = [value_of(r, shape, dtype) for r in range(size)]
            sent = everything[rank].clone()
            communicator.broadcast(sent, root)
            same([sent], [everything[root]])
            same(communicator.all_gather(everything[rank]), everything)
            gathered = communicator.gather(everything[rank], root)
            assert (gathered is not None) == (rank == root)
            same(gathered or [], everything if rank == root else [])
    communicator.barrier()


def value_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    length = torch.Size(shape).numel() * dtype.itemsize
    numbers = (torch.arange(length) * (rank + 1)) % (2 if dtype is torch.bool else 251)
    return numbers.to(torch.uint8).view(dtype).reshape(shape)


def same(results: list[Tensor], expected: list[Tensor]) -> None:
    assert [(t.dtype, t.shape) for t in results] == [(t.dtype, t.shape) for t in expected]
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(bytes_of(result), bytes_of(other))


def gather_uneven(communicator: Communicator) -> None:
    rank, size = communicator.rank, communicator.size
    for unit in [1, 3, 400_000]:
        tensors = [torch.full((r * unit, 2), r, dtype=torch.int32) for r in range(size)]
        same(communicator.all_gather(tensors[rank]), tensors)
        mixed = [torch.full((2,) * r, float(r)) for r in range(size)]
        same(communicator.all_gather(mixed[rank]), mixed)
        gathered = communicator.gather(mixed[rank], 0)
        assert (gathered is not None) == (rank == 0)
        same(gathered or [], mixed if rank == 0 else [])


def reduce_and_share_parts(communicator: Communicator) -> None:
    rank, size = communicator.rank, communicator.size
    cases = itertools.product([torch.float16, torch.float32, torch.complex64], [0, 5, 700_001])
    for (dtype, length), num_terms in itertools.product(cases, [1, 2]):
        every = [term(r, i, (length,), dtype) for r in range(size) for i in range(num_terms)]
        expected = tree_reduce(ReduceOp.SUM, every)
        arena = communicator.allocate(num_terms * every[0].nbytes).view(dtype)
        for memory in (arena, torch.empty_like(arena), arena if rank else torch.empty_like(arena)):
            own = [*memory.view(num_terms, length)]
            for one, value in zip(own, every[rank * num_terms :], strict=False):
                one.copy_(value)
            communicator.reduce_parts(ReduceOp.SUM, own)
            cut = slice_of(rank, size, length)
            assert torch.equal(own[0][cut], expected[cut])
            communicator.share_parts(own[0])
            assert torch.equal(own[0], expected)
            # Nobody still reads what this rank has.
            memory.zero_()


def lead(communicator: Communicator) -> None:
    rank, size = communicator.rank, communicator.size
    # The last ones do not fit into a slot.
    for brought in [torch.arange(5), torch.ones(0), torch.arange(200_000.0)]:
        own = [brought * (rank + 1), brought.clone()]

        def work(every: list[Tensor], own: list[Tensor] = own) -> None:
            assert len(every) == 2 * size
            own[0].copy_(torch.stack(every).sum(0))

        assert communicator.lead(bytes(16), own, work) is None
        assert torch.equal(own[0], brought * (size * (size + 1) // 2 + size))
    assert communicator.lead(bytes(16)) is None
    others = [bytes(16), *[b"another greeting"] * (size - 1)]
    greeting = others[rank]
    assert communicator.lead(greeting, own, work) == (others if size > 1 else None)
    # Also where one leads and another gathers.
    if rank:
        assert communicator.lead(greeting) == others
    else:
        gathered = communicator.all_gather(torch.tensor([*greeting], dtype=torch.uint8))
        assert [bytes(one.tolist()) for one in gathered] == others
    communicator.barrier()


def reduce_unusual_memory(communicator: Communicator) -> None:
    rank, size = communicator.rank, communicator.size
    sums = size * (size + 1) / 2
    base = torch.full((4, 6), float(rank + 1))
    for view in (base[:, 1:3], base.t(), torch.nn.Parameter(base.clone())):
        with torch.no_grad():
            view.fill_(rank + 1)
        communicator.all_reduce(ReduceOp.SUM, [view])
        assert (view == sums).all()
        with torch.no_grad():
            view.fill_(rank + 1)
        communicator.broadcast(view, size - 1)
        assert all((t == size).all() for t in communicator.all_gather(view))
    conjugate = torch.complex(torch.ones(3), torch.ones(3)).conj()
    communicator.all_reduce(ReduceOp.SUM, [conjugate])
    assert torch.equal(conjugate, torch.full((3,), complex(size, -size)))


def refuse(communicator: Communicator) -> list[str]:
    texts = []
    for op, terms in [
        (ReduceOp.SUM, [torch.tensor([True])]),
        (ReduceOp.MAX, [torch.ones(2, dtype=torch.complex64)]),
        (ReduceOp.MEAN, [torch.ones(2, dtype=torch.int32)]),
        (ReduceOp.SUM, [torch.eye(2).to_sparse()]),
        (ReduceOp.SUM, []),
    ]:
        with pytest.raises(UnsupportedError) as raised:
            communicator.all_reduce(op, terms)
        texts.append(str(raised.value))
    with pytest.raises(UnsupportedError, match="root"):
        communicator.broadcast(torch.ones(2), communicator.size)
    communicator.all_reduce(ReduceOp.SUM, [torch.ones(2)])
    return texts


def test_what_has_no_meaning_is_refused_before_anything_is_sent() -> None:
    first, second = run(2, refuse)

    assert first == second


def reduce_complex_products(communicator: Communicator) -> None:
    for op, dtype in [
        (ReduceOp.PROD, torch.complex64),
        (ReduceOp.SUM, torch.complex32),
        (ReduceOp.MEAN, torch.complex32),
    ]:
        check_reduction(communicator, op, dtype, (9,), 2)


def reduce_in_arena(communicator: Communicator) -> None:
    rank, size = communicator.rank, communicator.size
    for dtype, length, num_terms in [
        (torch.float32, 1_000_003, 1),
        (torch.float32, 300_001, 2),
        (torch.bfloat16, 300_001, 3),
        (torch.float32, 100, 1),
        (torch.float32, 0, 1),
    ]:
        expected = tree_reduce(
            ReduceOp.SUM,
            [term(r, i, (length,), dtype) for r in range(size) for i in range(num_terms)],
        )
        own = [allocate_like(communicator, length, dtype) for _ in range(num_terms)]
        for _ in range(3):
            for i, tensor in enumerate(own):
                tensor.copy_(term(rank, i, (length,), dtype))
            communicator.all_reduce(ReduceOp.SUM, own)
            same(own[:1], [expected])


def allocate_like(communicator: Communicator, length: int, dtype: torch.dtype) -> Tensor:
    return communicator.allocate(length * dtype.itemsize).view(dtype)


def reduce_at_different_places(communicator: Communicator) -> None:
    rank, size = communicator.rank, communicator.size
    first, second = (allocate_like(communicator, 500_000, torch.float32) for _ in range(2))
    for own in [
        first if rank == 0 else torch.empty(500_000),
        first if rank == 0 else second,
        torch.empty(500_000) if rank == 0 else second,
    ]:
        own.fill_(rank + 1)
        communicator.all_reduce(ReduceOp.SUM, [own])
        assert (own == size * (size + 1) / 2).all()


def allocate_and_close(communicator: Communicator) -> None:
    tensor = communicator.allocate(10_000_000)
    empty = communicator.allocate(0)
    with pytest.raises(MemoryError, match="Allocate less"):
        communicator.allocate(1 << 50)
    communicator.close()
    communicator.close()
    assert tensor.fill_(7).sum() == 70_000_000
    assert empty.numel() == 0


def test_allocated_tensors_outlive_the_communicator() -> None:
    run(2, allocate_and_close)


def reduce_from_two_threads(communicator: Communicator) -> None:
    def reduce_often(_: int) -> None:
        for _ in range(50):
            tensor = torch.ones(1000)
            communicator.all_reduce(ReduceOp.SUM, [tensor])
            assert (tensor == communicator.size).all()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(reduce_often, range(2)))


# Ranks are expensive to start, so they do everything one after the other.
AT_EVERY_SIZE: list[Body] = [
    reduce_every_dtype,
    reduce_every_length,
    reduce_means,
    move,
    reduce_in_arena,
    reduce_and_share_parts,
    lead,
]
AT_SIZE: dict[int, list[Body]] = {
    1: [gather_uneven],
    2: [
        gather_uneven,
        reduce_unusual_memory,
        reduce_at_different_places,
        reduce_from_two_threads,
    ],
    3: [reduce_at_different_places, reduce_complex_products],
    5: [gather_uneven],
    8: [],
}


def do_all(communicator: Communicator) -> None:
    for body in AT_EVERY_SIZE + AT_SIZE[communicator.size]:
        body(communicator)


@pytest.mark.parametrize("size", AT_SIZE)
def test_every_collective_has_the_bits_of_the_tree_and_moves_every_byte(size: int) -> None:
    run(size, do_all)
