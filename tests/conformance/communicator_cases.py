"""What every communicator must do, as a list of cases that a rank runs from first to last."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from unisono.communicators.communicator import Communicator, slice_of
from unisono.kernels import divide, tree_reduce, wide_dtype
from unisono.options import ReduceOp

SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
REDUCED = [*FLOATS, *COMPLEX, *SIGNED, *UNSIGNED]
MOVED = [*REDUCED, torch.bool]
Shape = tuple[int, ...]
SHAPES: list[Shape] = [(), (0,), (1,), (3, 7), (70_001,)]
LARGE: Shape = (700_001,)

EVERY_CASE = slice(None)

Case = Callable[[Communicator], str | None]


def drawn(name: str, rank: int, dtype: torch.dtype, shape: Shape) -> Tensor:
    """The same numbers for a name and a rank, on whichever rank they are drawn."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{rank}".encode()))
    # A prime number of them, again and again: to draw many takes longer than to send them.
    numbers = torch.randn(997, generator=generator, dtype=torch.float64) * 3
    length = math.prod(shape)
    numbers = numbers.repeat(length // 997 + 1)[:length].view(shape)
    if dtype.is_complex:
        return torch.complex(numbers, numbers.flip(-1) if shape else -numbers).to(dtype)
    if dtype.is_floating_point:
        return numbers.to(dtype)
    # Through the absolute value, so that no negative number meets an unsigned dtype.
    return numbers.abs().to(torch.int64).to(dtype)


def reduced(op: ReduceOp, terms: Sequence[Tensor], count: int | None) -> Tensor:
    if count is None:
        return tree_reduce(op, terms)
    dtype = terms[0].dtype
    total = tree_reduce(SUM, [term.to(wide_dtype(dtype)) for term in terms])
    return divide(total, count, dtype)


def difference(found: Tensor, expected: Tensor) -> str | None:
    """In words, how two tensors differ, to the bit."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f"{found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    raw = [t.contiguous().view(-1).view(torch.uint8) for t in (found, expected)]
    return None if torch.equal(*raw) else f"got {found.flatten()[:4]}, not {expected.flatten()[:4]}"


def first(differences: Iterator[str | None]) -> str | None:
    return next((text for text in differences if text is not None), None)


def drawn_terms(
    communicator: Communicator, name: str, dtype: torch.dtype, shape: tuple[int, ...], terms: int
) -> list[list[Tensor]]:
    """The terms that each rank brings."""
    return [
        [drawn(f"{name}/{i}", rank, dtype, shape) for i in range(terms)]
        for rank in range(communicator.size)
    ]


def all_reduce(
    name: str,
    op: ReduceOp,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    terms: int,
    count: int | None,
) -> Case:
    def case(communicator: Communicator) -> str | None:
        by_rank = drawn_terms(communicator, name, dtype, shape, terms)
        expected = reduced(op, [term for own in by_rank for term in own], count)
        own = by_rank[communicator.rank]
        communicator.all_reduce(op, own, count)
        return difference(own[0], expected)

    return case


def reduce_scatter(
    name: str,
    op: ReduceOp,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    terms: int,
    count: int | None,
) -> Case:
    def case(communicator: Communicator) -> str | None:
        by_rank = drawn_terms(communicator, name, dtype, shape, terms)
        expected = reduced(op, [term for own in by_rank for term in own], count).view(-1)
        part = slice_of(communicator.rank, communicator.size, len(expected))
        found = communicator.reduce_scatter(op, by_rank[communicator.rank], count)
        return difference(found, expected[part])

    return case


def all_gather(name: str, dtype: torch.dtype, shape: Shape, uneven: bool) -> Case:
    def case(communicator: Communicator) -> str | None:
        shapes = [(rank, *shape) if uneven else shape for rank in range(communicator.size)]
        tensors = [drawn(name, rank, dtype, shape) for rank, shape in enumerate(shapes)]
        found = communicator.all_gather(tensors[communicator.rank])
        return first(difference(*pair) for pair in zip(found, tensors, strict=True))

    return case


def gather(name: str, dtype: torch.dtype, shape: Shape, uneven: bool) -> Case:
    def case(communicator: Communicator) -> str | None:
        root = communicator.size - 1
        shapes = [(rank, *shape) if uneven else shape for rank in range(communicator.size)]
        tensors = [drawn(name, rank, dtype, shape) for rank, shape in enumerate(shapes)]
        found = communicator.gather(tensors[communicator.rank], root)
        if communicator.rank != root:
            return None if found is None else "got something, though it is not the root"
        assert found is not None
        return first(difference(*pair) for pair in zip(found, tensors, strict=True))

    return case


def all_to_all(name: str, dtype: torch.dtype, shape: Shape) -> Case:
    def case(communicator: Communicator) -> str | None:
        tensors = [drawn(name, rank, dtype, shape) for rank in range(communicator.size)]
        part = slice_of(communicator.rank, communicator.size, math.prod(shape))
        expected = [tensor.flatten()[part] for tensor in tensors]
        found = communicator.all_to_all(tensors[communicator.rank])
        return first(difference(*pair) for pair in zip(found, expected, strict=True))

    return case


def share_parts(name: str, dtype: torch.dtype, shape: Shape) -> Case:
    def case(communicator: Communicator) -> str | None:
        size, length = communicator.size, math.prod(shape)
        tensors = [drawn(name, rank, dtype, shape) for rank in range(size)]
        parts = [one.view(-1)[slice_of(rank, size, length)] for rank, one in enumerate(tensors)]
        expected = torch.cat(parts).view(shape)
        found = tensors[communicator.rank]
        communicator.share_parts(found)
        return difference(found, expected)

    return case


def broadcast(name: str, dtype: torch.dtype, shape: Shape) -> Case:
    def case(communicator: Communicator) -> str | None:
        root = communicator.size // 2
        tensor = drawn(name, communicator.rank, dtype, shape)
        communicator.broadcast(tensor, root)
        return difference(tensor, drawn(name, root, dtype, shape))

    return case


def barrier(communicator: Communicator) -> str | None:
    communicator.barrier()
    return None


def reductions() -> Iterator[tuple[ReduceOp, torch.dtype, Shape]]:
    """Every operation with every dtype, and every shape with some."""
    for dtype in REDUCED:
        for op in ReduceOp:
            is_float = dtype.is_floating_point or dtype.is_complex
            is_ordered = op in (ReduceOp.MIN, ReduceOp.MAX)
            if not (op is MEAN and not is_float) and not (is_ordered and dtype.is_complex):
                yield op, dtype, (3, 7)
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.complex128):
            yield SUM, dtype, shape
    for dtype in (torch.float32, torch.float16):
        yield MEAN, dtype, LARGE


def cases() -> dict[str, Case]:
    """All cases by name."""
    made: dict[str, Case] = {"barrier": barrier}
    for op, dtype, shape in reductions():
        name = f"{op.value} {dtype} {shape}"
        made[f"all_reduce {name}"] = all_reduce(name, op, dtype, shape, 1, None)
        made[f"reduce_scatter {name}"] = reduce_scatter(name, op, dtype, shape, 1, None)
    for dtype in (torch.float16, torch.float32, torch.complex64):
        for terms, count, shape in [(2, None, (9,)), (3, 7, (9,)), (1, 5, (0,)), (3, 7, (70_001,))]:
            name = f"{terms} terms over {count}, {dtype} {shape}"
            made[f"all_reduce {name}"] = all_reduce(name, MEAN, dtype, shape, terms, count)
            made[f"reduce_scatter {name}"] = reduce_scatter(name, MEAN, dtype, shape, terms, count)
    moved: list[tuple[torch.dtype, Shape]] = [(dtype, (3, 7)) for dtype in MOVED]
    moved += [(torch.float32, shape) for shape in [*SHAPES, LARGE]]
    for shape in [*SHAPES, LARGE]:
        made[f"all_to_all {shape}"] = all_to_all(f"parts {shape}", torch.bfloat16, shape)
    for dtype, shape in moved:
        name = f"{dtype} {shape}"
        made[f"broadcast {name}"] = broadcast(name, dtype, shape)
        made[f"share_parts {name}"] = share_parts(name, dtype, shape)
        for uneven in (False, True):
            kind = f"{name} {'uneven' if uneven else 'even'}"
            made[f"all_gather {kind}"] = all_gather(name, dtype, shape, uneven)
            made[f"gather {kind}"] = gather(name, dtype, shape, uneven)
    return made


def failed_cases(communicator: Communicator, part: slice = EVERY_CASE) -> list[str]:
    """Runs every case of a part twice, and returns those that went wrong."""
    failed = []
    for name, case in list(cases().items())[part]:
        for attempt in ("first", "second"):
            if (found := case(communicator)) is not None:
                failed.append(f"{name}, {attempt} time: {found}")
    return failed
