"""What replicas counted, as tensors that workers exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.errors import ReplicaMismatchError, UnsupportedError


class Part(NamedTuple):
    """What one replica counted in a run."""

    num_updates: int
    was_reset: bool
    # Tensors, and lists of tensors.
    states: dict[str, Any]


def as_list(value: Any) -> list[Any]:
    """Returns a state as a list, which it may be already."""
    return value if isinstance(value, list) else [value]


def packed(found: Mapping[int, Sequence[Part]], names: Mapping[int, str]) -> list[Tensor]:
    """Returns parts as tensors, the first of which says what the others are."""
    numbers, tensors = [], []
    for number, parts in found.items():
        numbers += [number, len(parts)]
        for part in parts:
            numbers += [part.num_updates, part.was_reset]
            for name, value in part.states.items():
                numbers.append(len(value) if isinstance(value, list) else -1)
                if not all(isinstance(one, Tensor) for one in as_list(value)):
                    raise UnsupportedError(
                        f"The state {name!r} of {names[number]} holds objects other than tensors, "
                        "which workers cannot exchange. Update the metric outside `run`."
                    )
                tensors += as_list(value)
    return [torch.tensor(numbers), *tensors] if numbers else []


def unpacked(
    tensors: Sequence[Tensor], states: Mapping[int, Sequence[str]]
) -> Iterator[tuple[int, list[Part]]]:
    """Yields the numbers of metrics, with what the replicas of one worker have counted."""
    numbers, rest = iter(tensors[0].tolist() if tensors else ()), iter(tensors[1:])

    def value() -> Any:
        length = next(numbers)
        return next(rest) if length < 0 else [next(rest) for _ in range(length)]

    def part(names: Sequence[str]) -> Part:
        num_updates, was_reset = next(numbers), bool(next(numbers))
        own = {name: value() for name in names} if num_updates else {}
        return Part(num_updates, was_reset, own)

    for number in numbers:
        if number not in states:
            raise ReplicaMismatchError(
                "Another worker has updated a metric that this worker does not have. Make and "
                "update the same metrics in the same order on every worker."
            )
        yield number, [part(states[number]) for _ in range(next(numbers))]
