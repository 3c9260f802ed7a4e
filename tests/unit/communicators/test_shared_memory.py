"""Collectives between real processes, through shared memory."""

from __future__ import annotations

import itertools
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

SIZES = [1, 2, 3, 5, 8]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64]
INTEGERS += [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
ORDERED = (ReduceOp.MIN, ReduceOp.MAX)
# More than a slot holds, in float32.
LARGE = [131_073, 700_001]

Body = Callable[[Communicator], object]


def in_communicator(store: Store, rank: int, size: int, body: Body) -> object:
    with SharedMemoryCommunicator(store, rank, size, timeout_seconds=30) as communicator:
        return body(communicator)


def run(size: int, body: Body) -> list[object]:
    return run_ranks(size, in_communicator, body)


def term(rank: int, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a rank brings; every rank can tell what the others bring."""
    generator = torch.Generator().manual_seed(1000 * rank + index)
    values = torch.randn(shape, generator=generator) * 20
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


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "body", [reduce_every_dtype, reduce_every_length, reduce_means], ids=lambda body: body.__name__
)
def test_reductions_have_the_bits_of_the_tree(size: int, body: Body) -> None:
    run(size, body)


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


@pytest.mark.parametrize("size", SIZES)
def test_bytes_of_every_dtype_are_moved(size: int) -> None:
    run(size, move)


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


@pytest.mark.parametrize("size", [1, 2, 5])
def test_gathered_shapes_may_differ(size: int) -> None:
    run(size, gather_uneven)


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


def test_tensors_that_are_not_contiguous_are_copied() -> None:
    run(2, reduce_unusual_memory)


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


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_complex_products_go_through_torch() -> None:
    run(3, reduce_complex_products)


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


@pytest.mark.parametrize("size", SIZES)
def test_tensors_in_the_arena_are_reduced_where_they_are(size: int) -> None:
    run(size, reduce_in_arena)


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


@pytest.mark.parametrize("size", [2, 3])
def test_not_all_ranks_need_the_arena(size: int) -> None:
    run(size, reduce_at_different_places)


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


def test_threads_of_a_rank_take_turns() -> None:
    run(2, reduce_from_two_threads)
