"""Parts of one replica each, which come several at a time and are taken in any number."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from unisono.input.splits.splitter import SplitBatch, grouped
from unisono.values import Tree


class Part(NamedTuple):
    """What one replica gets.

    Attributes:
        structure: Its samples.
        tree: How they are structured.
        num_samples: How many there are.
        is_counted: Whether that is known; otherwise the part counts as one.
    """

    structure: Any
    tree: Tree
    num_samples: int
    is_counted: bool


class PartQueue:
    """The parts of this worker that are still to be used. `draw` raises `StopIteration`."""

    def __init__(self, draw: Callable[[], SplitBatch]) -> None:
        self._draw = draw
        self._parts: deque[Part] = deque()
        self._has_ended = False

    def take(self, num_parts: int) -> list[Part]:
        """Returns the next parts: fewer at the end."""
        while len(self._parts) < num_parts and not self._has_ended:
            try:
                drawn = self._draw()
            except StopIteration:
                self._has_ended = True
            else:
                self._parts.extend(
                    Part(drawn.part(i), drawn.tree, count, drawn.is_counted)
                    for i, count in enumerate(drawn.counts)
                )
        return [self._parts.popleft() for _ in range(min(num_parts, len(self._parts)))]

    def put_back(self, parts: Sequence[Part]) -> None:
        """Undoes `take`."""
        self._parts.extendleft(reversed(parts))


def together(parts: Sequence[Part], spares: Iterable[Any], tree: Tree | None = None) -> SplitBatch:
    """Returns the input of a step: parts, and spares of structure `tree` that count nothing."""
    if parts:
        tree = parts[0].tree if all(part.tree == parts[0].tree for part in parts) else None
    lent = list(spares)
    counts = (*(part.num_samples for part in parts), *(0 for _ in lent))
    return grouped([*(part.structure for part in parts), *lent], counts, tree)
