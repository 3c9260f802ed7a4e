"""Small results of a run, which the replicas of all workers tell each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.values import PerReplica

# A loss, a count or a few predictions. What is larger stays with its replica.
_MOST_BYTES = 4096
_LENGTH_BYTES = 8
_DTYPES = {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}

# By leaf, the component of each replica; None where a replica has one that is not told.
Known = list[tuple[Any, ...] | None]


class Told(NamedTuple):
    """What all workers have told each other.

    Attributes:
        known: The small components of all replicas.
        is_asked: Whether somebody asks a worker to be let in.
        signs: By rank, whether the worker is preempted; see `Departures`.
    """

    known: Known
    is_asked: bool
    signs: list[int]


def packed(leaves: Sequence[PerReplica], *, is_asked: bool = False, sign: int = 0) -> Tensor:
    """Returns the small components of some values as bytes.

    Args:
        leaves: The values.
        is_asked: Whether somebody asks this worker to be let in.
        sign: Whether this worker is preempted.
    """
    kinds: list[list[Any]] = []
    parts: list[bytes] = []
    for leaf in leaves:
        own: list[Any] = []
        kinds.append(own)
        for component in leaf.values:
            if _is_told(component):
                here = component.detach().cpu().contiguous()
                own.append([str(here.dtype).removeprefix("torch."), *here.shape])
                parts.append(here.reshape(-1).view(torch.uint8).numpy().tobytes())
            else:
                is_number = type(component) in (bool, int, float)
                own.append({"is": component} if is_number else None)
    header = json.dumps([is_asked, sign, kinds]).encode()
    pack = b"".join([len(header).to_bytes(_LENGTH_BYTES, "little"), header, *parts])
    return torch.frombuffer(bytearray(pack), dtype=torch.uint8)


def _is_told(component: Any) -> bool:
    return (
        isinstance(component, Tensor)
        and component.layout is torch.strided
        and component.nbytes <= _MOST_BYTES
        and str(component.dtype).removeprefix("torch.") in _DTYPES
        and not component.is_quantized
    )


def unpacked(rows: Sequence[Tensor]) -> Told:
    """Reads what `packed` returned on all workers, by rank."""
    asked, signs, by_worker = zip(*(_read(row.numpy().tobytes()) for row in rows), strict=True)
    told = Told([], any(asked), list(signs))
    if len({len(own) for own in by_worker}) > 1:
        return told
    for leaf in zip(*by_worker, strict=True):
        components = tuple(one for own in leaf for one in own)
        told.known.append(None if any(one is None for one in components) else components)
    return told


def _read(pack: bytes) -> tuple[bool, int, list[list[Any]]]:
    start = _LENGTH_BYTES + int.from_bytes(pack[:_LENGTH_BYTES], "little")
    is_asked, sign, kinds = json.loads(pack[_LENGTH_BYTES:start])
    found: list[list[Any]] = []
    for leaf in kinds:
        own: list[Any] = []
        found.append(own)
        for kind in leaf:
            if isinstance(kind, dict):
                own.append(kind["is"])
            elif kind is None:
                own.append(None)
            else:
                dtype, shape = _DTYPES[kind[0]], kind[1:]
                tensor = torch.empty(shape, dtype=dtype)
                stop = start + tensor.nbytes
                if tensor.numel():
                    data = torch.frombuffer(bytearray(pack[start:stop]), dtype=torch.uint8)
                    tensor.view(-1).view(torch.uint8).copy_(data)
                own.append(tensor)
                start = stop
    return is_asked, sign, found
