"""What a collective is, in a form that can be sent, compared and read."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unisono.errors import UnequalCollectivesError, UnsupportedError
from unisono.kernels import check_replicas, result_dtype
from unisono.options import ReduceOp

# A fixed size, so that a header can be received before its content is known.
HEADER_BYTES = 512
# Kinds of collectives in which every rank may bring another shape.
UNEVEN = ("all_gather", "gather")


@dataclass(frozen=True)
class Header:
    """A collective as one rank calls it.

    Attributes:
        sequence: How many collectives this rank has called, with this one.
        dtype: Without "torch.".
        count: What a sum is divided by.
    """

    kind: str
    sequence: int
    op: ReduceOp | None = None
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    terms: int = 0
    root: int | None = None
    count: int | None = None

    @classmethod
    def of_terms(
        cls, kind: str, sequence: int, op: ReduceOp, terms: Sequence[Tensor], count: int | None
    ) -> Header:
        """Describes a reduction, after a look at whether its terms can be reduced."""
        check_terms(kind, op, terms)
        dtype, shape = _name(terms[0].dtype), tuple(terms[0].shape)
        return cls(kind, sequence, op, dtype, shape, len(terms), None, count)

    @classmethod
    def of_tensor(cls, kind: str, sequence: int, tensor: Tensor, root: int | None = None) -> Header:
        """Describes a collective that moves tensors as they are."""
        return cls(kind, sequence, None, _name(tensor.dtype), tuple(tensor.shape), 1, root)

    def agrees_with(self, other: Header) -> bool:
        """Whether the ranks that call these two can go on together."""
        if self.kind in UNEVEN:
            other = replace(other, shape=self.shape)
        return self == other

    def encode(self) -> bytes:
        """Returns `HEADER_BYTES` bytes."""
        fields = self.kind, self.op, self.dtype, self.shape, self.terms, self.root, self.count
        encoded = b"[%d,%b" % (self.sequence, _encoded(*fields))
        if len(encoded) > HEADER_BYTES:
            raise UnsupportedError(
                f"A tensor of {len(self.shape)} dimensions cannot be sent: its shape, "
                f"{self.shape}, takes more than {HEADER_BYTES} bytes. Flatten it first."
            )
        return encoded.ljust(HEADER_BYTES)

    def as_tensor(self) -> Tensor:
        """Returns what `encode` does, as a tensor."""
        return torch.frombuffer(bytearray(self.encode()), dtype=torch.uint8)

    @classmethod
    def decode(cls, encoded: bytes) -> Header:
        """Reads what `encode` wrote."""
        sequence, kind, op, dtype, shape, terms, root, count = json.loads(encoded)
        op = None if op is None else ReduceOp(op)
        return cls(kind, sequence, op, dtype, tuple(shape), terms, root, count)

    def __str__(self) -> str:
        text = f"{self.kind} number {self.sequence}"
        if self.root is not None:
            text += f" {'to' if self.kind == 'gather' else 'from'} rank {self.root}"
        if self.dtype is None:
            return text
        tensors = "tensor" if self.terms == 1 else "tensors"
        what = f"{self.terms} {self.dtype} {tensors} of shape {self.shape}"
        if self.op is None:
            return f"{text}: {what}"
        over = "" if self.count is None else f" over {self.count}"
        return f"{text}: {self.op.value}{over} of {what}"


def check_agreement(headers: Mapping[int, Header]) -> None:
    """Raises unless the headers, by rank, are those of one collective."""
    first = next(iter(headers.values()))
    if all(first.agrees_with(header) for header in headers.values()):
        return
    by_call: dict[Header, list[int]] = {}
    for rank, header in headers.items():
        same = next((known for known in by_call if known.agrees_with(header)), header)
        by_call.setdefault(same, []).append(rank)
    calls = [f"{ranks_in_words(ranks)} called {call}" for call, ranks in by_call.items()]
    # Where most agree, the others are at fault; where nobody can tell, all are.
    most = max(by_call.values(), key=len)
    tied = sum(len(ranks) == len(most) for ranks in by_call.values()) > 1
    at_fault = [rank for rank in sorted(headers) if tied or rank not in most]
    raise UnequalCollectivesError(
        f"The ranks do not call the same collective: {'; '.join(calls)}. Every rank must make the "
        "same calls in the same order, with the same operation, dtype and shape.",
        at_fault,
    )


def check_gathered(own: Header, messages: Sequence[Tensor]) -> list[Header]:
    """Returns the headers with which messages of all ranks begin, if they are of one collective."""
    encoded = [one[:HEADER_BYTES].cpu().numpy().tobytes() for one in messages]
    return check_encoded(own, encoded, range(len(encoded)))


def check_encoded(own: Header, encoded: Sequence[bytes], ranks: Sequence[int]) -> list[Header]:
    """Does the same with headers as they were encoded. An error calls the ranks `ranks`."""
    if all(one == encoded[0] for one in encoded):
        return [own] * len(encoded)
    headers = list(map(Header.decode, encoded))
    check_agreement(dict(zip(ranks, headers, strict=True)))
    return headers


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Returns "rank 3", "ranks 1 and 2" or "ranks 0, 1 and 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=256)
def _encoded(kind: str, op: ReduceOp | None, *fields: Any) -> bytes:
    """Returns what a header has in common with those of the same calls before and after it."""
    values = [kind, None if op is None else op.value, *fields]
    return json.dumps(values, separators=(",", ":")).encode()[1:]


def check_terms(kind: str, op: ReduceOp, terms: Sequence[Tensor]) -> None:
    """Raises unless dense tensors of one rank can be combined in place."""
    ReduceOp.read(op)
    if not terms:
        raise UnsupportedError(f"`{kind}` needs at least one term on each rank, got none.")
    check_replicas(op, terms, "A term")
    first = terms[0]
    if op is ReduceOp.MEAN and result_dtype(op, first.dtype) != first.dtype:
        raise UnsupportedError(
            f"The mean of {first.dtype} has another dtype, so it cannot be written in place. "
            f"Convert the terms to {result_dtype(op, first.dtype)}, or take the sum."
        )
    if not all(term.layout is torch.strided and term.is_contiguous() for term in terms):
        raise UnsupportedError(
            f"`{kind}` takes dense contiguous terms, got {first.layout} with strides "
            f"{first.stride() if first.layout is torch.strided else None}. "
            "Call `.contiguous()`, or `all_reduce_sparse` for sparse ones."
        )
