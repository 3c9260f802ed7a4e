"""Small results of a run, which the replicas of all workers tell each other."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.values import PerReplica

# A loss, a count or a few predictions. What is larger stays with its replica.
_MOST_BYTES = 4096
# What a worker tells begins with whether it is asked to let somebody in, and the length of a text
# that lists what follows. Everything begins at a multiple of this.
_STEP_BYTES = 16
_DTYPES = {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}
_NAMES = {kind: name for name, kind in _DTYPES.items()}

# By leaf, the component of each replica; None where a replica has one that is not told.
Known = list[tuple[Any, ...] | None]


def packed(leaves: Sequence[PerReplica], *, is_asked: bool = False) -> Tensor:
    """Returns the small components of some values as bytes.

    Args:
        leaves: The values.
        is_asked: Whether somebody asks this worker to be let in.
    """
    kinds: list[tuple[Any, ...]] = []
    parts: list[bytes] = []
    has_numbers = False
    for leaf in leaves:
        own: list[Any] = []
        for component in leaf.values:
            if _is_told(component):
                here = component.detach().cpu().contiguous()
                own.append((_NAMES[here.dtype], *here.shape))
                parts.append(_padded(here.view(-1).view(torch.uint8).numpy().tobytes(), b"\0"))
            else:
                is_number = type(component) in (bool, int, float)
                own.append({"is": component} if is_number else None)
                has_numbers = has_numbers or is_number
        kinds.append(tuple(own))
    # Numbers that are equal may have other bits.
    header = _written(kinds) if has_numbers else _written_once(tuple(kinds))
    start = int(is_asked).to_bytes(8, "little") + len(header).to_bytes(8, "little")
    return torch.frombuffer(bytearray(b"".join([start, header, *parts])), dtype=torch.uint8)


def _is_told(component: Any) -> bool:
    return (
        isinstance(component, Tensor)
        and component.layout is torch.strided
        and component.nbytes <= _MOST_BYTES
        and component.dtype in _NAMES
        and not component.is_quantized
    )


def _written(kinds: Sequence[Any]) -> bytes:
    return _padded(json.dumps(kinds).encode(), b" ")


_written_once = functools.lru_cache(64)(_written)


def _padded(data: bytes, filler: bytes) -> bytes:
    return data + -len(data) % _STEP_BYTES * filler


def unpacked(rows: Sequence[Tensor]) -> tuple[Known, bool]:
    """Reads what `packed` returned on all workers, by rank; and whether a worker is asked."""
    told = list(map(_read, rows))
    by_worker, is_asked = [own for _, own in told], any(is_asked for is_asked, _ in told)
    known: Known = []
    if len({len(own) for own in by_worker}) > 1:
        return known, is_asked
    for leaf in zip(*by_worker, strict=True):
        components = tuple(one for own in leaf for one in own)
        known.append(None if any(one is None for one in components) else components)
    return known, is_asked


def _read(row: Tensor) -> tuple[bool, list[list[Any]]]:
    # Components are parts of it, which must be aligned.
    row = row.clone() if row.storage_offset() % _STEP_BYTES else row
    data = row.numpy()
    is_asked, length = data[:_STEP_BYTES].view("<i8").tolist()
    start = _STEP_BYTES + length
    found: list[list[Any]] = []
    for leaf in _listed(data[_STEP_BYTES:start].tobytes()):
        own: list[Any] = []
        found.append(own)
        for kind in leaf:
            if isinstance(kind, tuple):
                dtype, shape, num_bytes = kind
                own.append(row[start : start + num_bytes].view(dtype).view(shape))
                start += num_bytes + -num_bytes % _STEP_BYTES
            else:
                own.append(None if kind is None else kind["is"])
    return bool(is_asked), found


@functools.lru_cache(64)
def _listed(header: bytes) -> list[list[Any]]:
    """Returns the dtype, shape and number of bytes of each component, or what else is told."""
    return [[_kind(kind) for kind in leaf] for leaf in json.loads(header)]


def _kind(kind: Any) -> Any:
    if not isinstance(kind, list):
        return kind
    dtype, shape = _DTYPES[kind[0]], kind[1:]
    return dtype, shape, dtype.itemsize * math.prod(shape)
