"""Sums of ranks that bring different numbers of terms.

Every sum of the library is one tree over the replicas (`unisono.kernels.tree`). A rank that has
replicas 3, 4 and 5 brings two *nodes* of it, the value of 3 and the sum of 4 and 5:

    8 replicas   ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
    rank 0         0 + 1     2
    rank 1                       3       4 + 5
    rank 2                                         6 + 7

Each rank gets its part of all nodes, combines them in the order of the tree, and gives the result
to all others. So every layout gives the bits of one rank with all replicas.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.algorithms.nodes import are_siblings, merged
from unisono.communicators.communicator import Communicator, as_bytes, slice_of
from unisono.communicators.headers import HEADER_BYTES, Header, check_gathered
from unisono.costs import SMALL_BYTES
from unisono.kernels import combine_into, divide, undivided, wide_dtype
from unisono.options import ReduceOp


class Node(NamedTuple):
    """A node of the tree: what replicas `start` to `stop - 1` make together."""

    start: int
    stop: int


def nodes_of(start: int, stop: int, num_replicas: int) -> list[Node]:
    """Returns the fewest nodes of the tree of `num_replicas` that make `start` to `stop - 1`.

    >>> [tuple(node) for node in nodes_of(3, 6, 8)], [tuple(node) for node in nodes_of(4, 7, 7)]
    ([(3, 4), (4, 6)], [(4, 7)])
    """
    leaves = ((replica, replica + 1) for replica in range(start, stop))
    return list(itertools.starmap(Node, merged(leaves, num_replicas)))


def all_reduce_nodes(
    communicator: Communicator,
    op: ReduceOp,
    terms: Sequence[Tensor],
    nodes: Sequence[Sequence[Node]],
    count: int | None = None,
) -> None:
    """Combines the nodes of all ranks into the first term of each rank.

    Args:
        nodes: Which nodes each rank brings, by rank. Together they are all replicas.
        count: For a mean, what to divide the sum by; the number of replicas if not given.
    """
    header = replace(Header.of_terms("all_reduce", 0, op, terms, count), terms=1)
    flat = [term.detach().view(-1) for term in terms]
    every = [node for own in nodes for node in own]
    count = (every[-1].stop if count is None else count) if op is ReduceOp.MEAN else None
    if not communicator.keeps_order(terms[0]):
        total = _combined(op, flat, nodes[communicator.rank], every[-1].stop)
        communicator.all_reduce(op, [total], count)
        flat[0].copy_(total)
        return

    def finish(found: list[Tensor]) -> Tensor:
        total = _combined(op, found, every, every[-1].stop)
        return total.to(terms[0].dtype) if count is None else divide(total, count, terms[0].dtype)

    if len(every) * flat[0].nbytes <= SMALL_BYTES:
        message = torch.cat([header.as_tensor().to(flat[0].device), *map(as_bytes, flat)])
        gathered = communicator.all_gather(message)
        flat[0].copy_(finish(_opened(header, gathered, flat[0].dtype, nodes)))
        return
    parts = _exchanged(communicator, header, flat, nodes)
    torch.cat(communicator.all_gather(finish(parts)), out=flat[0])


def _exchanged(
    communicator: Communicator,
    header: Header,
    terms: Sequence[Tensor],
    nodes: Sequence[Sequence[Node]],
) -> list[Tensor]:
    """Returns this rank's part of all nodes of all ranks."""
    size, length = communicator.size, len(terms[0])
    most_nodes, most_elements = max(map(len, nodes)), -(-length // size)
    prefix = header.as_tensor().to(terms[0].device)
    room = most_nodes * most_elements * terms[0].itemsize
    message = prefix.new_zeros(size, HEADER_BYTES + room)
    message[:, :HEADER_BYTES] = prefix
    for rank in range(size):
        own = torch.cat([as_bytes(term[slice_of(rank, size, length)]) for term in terms])
        message[rank, HEADER_BYTES : HEADER_BYTES + len(own)] = own
    part = slice_of(communicator.rank, size, length)
    num_bytes = (part.stop - part.start) * terms[0].itemsize
    received = [
        one[: HEADER_BYTES + len(own) * num_bytes]
        for one, own in zip(communicator.all_to_all(message.view(-1)), nodes, strict=True)
    ]
    return _opened(header, received, terms[0].dtype, nodes)


def _opened(
    header: Header, messages: Sequence[Tensor], dtype: torch.dtype, nodes: Sequence[Sequence[Node]]
) -> list[Tensor]:
    """Returns the nodes in the messages of all ranks, which must call the same."""
    check_gathered(header, messages)
    return [
        term
        for message, own in zip(messages, nodes, strict=True)
        for term in message[HEADER_BYTES:].view(dtype).chunk(len(own))
    ]


def _combined(
    op: ReduceOp, terms: Sequence[Tensor], nodes: Sequence[Node], num_replicas: int
) -> Tensor:
    """Combines neighboring nodes, without rounding to a narrow dtype. May overwrite `terms`.

    Nodes that are left over, because a part of the tree is missing, are combined last.
    """
    combine = undivided(op)
    found: list[tuple[Node, Tensor]] = []

    def merge() -> None:
        (last, right), (first, left) = found.pop(), found.pop()
        combine_into(combine, [left, right], [left], None)
        found.append((Node(first.start, last.stop), left))

    wide = wide_dtype(terms[0].dtype)
    for node, term in zip(nodes, terms, strict=True):
        found.append((node, term.to(wide)))
        while len(found) > 1 and are_siblings(found[-2][0], found[-1][0], num_replicas):
            merge()
    while len(found) > 1:
        merge()
    return found[0][1]


def plain_terms(ranges: Sequence[range]) -> int | None:
    """Returns how many neighbors make a term, if every rank can bring the same number of terms.

    The tree over these terms, which is what `Communicator.all_reduce` adds up, is then that of all
    replicas.

    >>> plain_terms([range(0, 2), range(2, 3)]), plain_terms([range(0, 3), range(3, 6)])
    (2, 1)
    >>> plain_terms([range(0, 3), range(3, 6), range(6, 8)])
    """
    for level in reversed(range(max(map(len, ranges)).bit_length() + 1)):
        width = 1 << level
        are_aligned = all(own.start % width == 0 for own in ranges)
        if are_aligned and len({-(-len(own) // width) for own in ranges}) == 1:
            return width
    return None
