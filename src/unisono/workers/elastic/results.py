"""Small results of a run, which the replicas of all workers tell each other."""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.values import PerReplica

# A loss, a count or a few predictions. What is larger stays with its replica.
_MOST_BYTES = 4096
# What a worker tells begins with whether it is asked to let somebody in, its sign, and the length
# of a text that lists what follows. Everything begins at a multiple of so many bytes.
_START = "<iiq"
_STEP_BYTES = 16
_DTYPES = {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}
_NAMES = {kind: name for name, kind in _DTYPES.items()}


class Told(NamedTuple):
    """What the workers have told each other.

    Attributes:
        known: By leaf, the component of each replica; None where a replica has one that is not
            told.
        variables: By rank and by the number of a variable, what replicas wrote for themselves.
        is_asked: Whether somebody asks to be let in.
        signs: By rank, whether the worker is preempted; see `Departures`.
    """

    known: list[tuple[Any, ...] | None]
    variables: list[dict[int, list[Tensor]]]
    is_asked: bool
    signs: list[int]


def packed(
    leaves: Sequence[PerReplica],
    variables: Mapping[int, Sequence[Tensor]] | None = None,
    *,
    is_asked: bool = False,
    sign: int = 0,
) -> Tensor:
    """Returns the small components of some values, and all of some variables, as bytes.

    Args:
        variables: The components of each variable, by its number.
        is_asked: Whether somebody asks this worker to be let in.
        sign: Whether this worker is preempted.
    """
    parts: list[bytes] = []
    kinds = tuple(tuple(_kind(one, parts, _MOST_BYTES) for one in leaf.values) for leaf in leaves)
    kept = tuple(
        (number, tuple(_kind(one, parts, None) for one in components))
        for number, components in (variables or {}).items()
    )
    try:
        header = _written_once(kinds, kept)
    except TypeError:
        # It has numbers, which may differ in bits although they are equal.
        header = _written(kinds, kept)
    start = struct.pack(_START, is_asked, sign, len(header))
    return torch.frombuffer(bytearray(b"".join([start, header, *parts])), dtype=torch.uint8)


def _kind(component: Any, parts: list[bytes], limit: int | None) -> Any:
    """Returns what a component is, and adds its bytes to `parts`."""
    if _is_told(component) and (limit is None or component.nbytes <= limit):
        here = component.detach().cpu().contiguous()
        parts.append(_padded(here.view(-1).view(torch.uint8).numpy().tobytes(), b"\0"))
        return _NAMES[here.dtype], *here.shape
    return {"is": component} if type(component) in (bool, int, float) else None


def _is_told(component: Any) -> bool:
    return (
        isinstance(component, Tensor)
        and component.layout is torch.strided
        and component.dtype in _NAMES
        and not component.is_quantized
    )


def _written(*listed: Any) -> bytes:
    return _padded(json.dumps(listed).encode(), b" ")


_written_once = functools.lru_cache(64)(_written)


def _padded(data: bytes, filler: bytes) -> bytes:
    return data + -len(data) % _STEP_BYTES * filler


def unpacked(rows: Sequence[Tensor]) -> Told:
    """Reads what `packed` returned on all workers, by rank."""
    asked, signs, by_worker, variables = zip(*map(_read, rows), strict=True)
    told = Told([], list(variables), any(asked), list(signs))
    if len({len(own) for own in by_worker}) > 1:
        return told
    for leaf in zip(*by_worker, strict=True):
        components = tuple(one for own in leaf for one in own)
        told.known.append(None if any(one is None for one in components) else components)
    return told


def _read(row: Tensor) -> tuple[bool, int, list[list[Any]], dict[int, list[Tensor]]]:
    # Components are parts of it, which must be aligned.
    row = row.clone() if row.storage_offset() % _STEP_BYTES else row
    data = row.numpy()
    is_asked, sign, length = struct.unpack(_START, data[:_STEP_BYTES].tobytes())
    kinds, kept = _listed(data[_STEP_BYTES : _STEP_BYTES + length].tobytes())
    reader = _Reader(row, _STEP_BYTES + length)
    leaves = [[reader.read(kind) for kind in leaf] for leaf in kinds]
    variables = {number: [reader.read(kind) for kind in own] for number, own in kept}
    return bool(is_asked), sign, leaves, variables


_listed: Callable[[bytes], Any] = functools.lru_cache(64)(json.loads)


class _Reader:
    """Reads components in the order in which they were packed."""

    def __init__(self, row: Tensor, start: int) -> None:
        self._row, self._start = row, start

    def read(self, kind: Any) -> Any:
        if not isinstance(kind, list):
            return kind and kind["is"]
        dtype, shape, start = _DTYPES[kind[0]], kind[1:], self._start
        stop = start + dtype.itemsize * math.prod(shape)
        self._start = stop + -stop % _STEP_BYTES
        return self._row[start:stop].view(dtype).view(shape)
