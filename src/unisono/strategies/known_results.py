"""Small results of a run, which the replicas of all workers tell each other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.values import PerReplica

# A loss, a count or a few predictions. What is larger stays with its replica.
_MOST_BYTES = 4096
_LENGTH_BYTES = 8
_DTYPES = {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}


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
        leaves: The values.
        variables: The components of each variable, by its number.
        is_asked: Whether somebody asks this worker to be let in.
        sign: Whether this worker is preempted.
    """
    parts: list[bytes] = []
    kinds = [[_kind(one, parts, _MOST_BYTES) for one in leaf.values] for leaf in leaves]
    kept = [
        (number, [_kind(one, parts, None) for one in components])
        for number, components in (variables or {}).items()
    ]
    header = json.dumps([is_asked, sign, kinds, kept]).encode()
    pack = b"".join([len(header).to_bytes(_LENGTH_BYTES, "little"), header, *parts])
    return torch.frombuffer(bytearray(pack), dtype=torch.uint8)


def _kind(component: Any, parts: list[bytes], limit: int | None) -> Any:
    """Returns what a component is, and adds its bytes to `parts`."""
    if _is_told(component) and (limit is None or component.nbytes <= limit):
        here = component.detach().cpu().contiguous()
        parts.append(here.reshape(-1).view(torch.uint8).numpy().tobytes())
        return [str(here.dtype).removeprefix("torch."), *here.shape]
    return {"is": component} if type(component) in (bool, int, float) else None


def _is_told(component: Any) -> bool:
    return (
        isinstance(component, Tensor)
        and component.layout is torch.strided
        and str(component.dtype).removeprefix("torch.") in _DTYPES
        and not component.is_quantized
    )


def unpacked(rows: Sequence[Tensor]) -> Told:
    """Reads what `packed` returned on all workers, by rank."""
    asked, signs, by_worker, variables = zip(
        *(_read(row.numpy().tobytes()) for row in rows), strict=True
    )
    told = Told([], list(variables), any(asked), list(signs))
    if len({len(own) for own in by_worker}) > 1:
        return told
    for leaf in zip(*by_worker, strict=True):
        components = tuple(one for own in leaf for one in own)
        told.known.append(None if any(one is None for one in components) else components)
    return told


def _read(pack: bytes) -> tuple[bool, int, list[list[Any]], dict[int, list[Tensor]]]:
    start = _LENGTH_BYTES + int.from_bytes(pack[:_LENGTH_BYTES], "little")
    is_asked, sign, kinds, kept = json.loads(pack[_LENGTH_BYTES:start])
    reader = _Reader(memoryview(pack)[start:])
    leaves = [[reader.read(kind) for kind in leaf] for leaf in kinds]
    variables = {number: [reader.read(kind) for kind in own] for number, own in kept}
    return is_asked, sign, leaves, variables


class _Reader:
    """Reads components in the order in which they were packed."""

    def __init__(self, rest: memoryview) -> None:
        self._rest = rest

    def read(self, kind: Any) -> Any:
        if not isinstance(kind, list):
            return kind and kind["is"]
        tensor = torch.empty(kind[1:], dtype=_DTYPES[kind[0]])
        if tensor.numel():
            data = torch.frombuffer(bytearray(self._rest[: tensor.nbytes]), dtype=torch.uint8)
            tensor.view(-1).view(torch.uint8).copy_(data)
            self._rest = self._rest[tensor.nbytes :]
        return tensor
