"""What a replica without samples does to its modules is undone: it counts nothing."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from unisono.variables.attributes import raw
from unisono.variables.metrics import is_clone
from unisono.variables.mirrors import Mirrors


@contextmanager
def undone(mirrors: Mirrors, replica_ids: Sequence[int]) -> Iterator[None]:
    """After the block, the modules of some replicas have the attributes of before it.

    What all replicas share is left alone. So are buffers and metrics: those of a replica without
    samples do not count where they are brought together.
    """
    restores: list[Callable[[], None]] = []
    for module, clone in mirrors.clones_of(replica_ids):
        if not is_clone(raw(clone)):
            shared = {**raw(module), "_buffers": raw(clone)["_buffers"]}
            restores.append(_Keeper(shared).kept(raw(clone)))
    try:
        yield
    finally:
        _call(restores)


class _Keeper:
    """Remembers tensors and containers as they are, but for those that `shared` holds, too."""

    def __init__(self, shared: dict[str, Any]) -> None:
        self._shared: set[int] = set()
        self._share(list(shared.values()))

    def _share(self, value: Any) -> None:
        self._shared.add(id(value))
        if isinstance(value, dict):
            value = value.values()
        elif not isinstance(value, _CONTAINERS):
            return
        for item in value:
            self._share(item)

    def kept(self, value: Any) -> Callable[[], None]:
        """Returns a function that makes `value`, and what it holds, what they are now."""
        if id(value) in self._shared or isinstance(value, nn.Parameter):
            return _nothing
        if isinstance(value, Tensor):
            return functools.partial(_write_back, value, value.detach().clone())
        if isinstance(value, dict):
            inner = [self.kept(item) for item in value.values()]
            return functools.partial(_fill_back, value, value.update, dict(value), inner)
        if not isinstance(value, _CONTAINERS):
            return _nothing
        inner = [self.kept(item) for item in value]
        if isinstance(value, tuple):
            return lambda: _call(inner)
        fill = value.update if isinstance(value, set) else value.extend
        return functools.partial(_fill_back, value, fill, list(value), inner)


_CONTAINERS = (list, tuple, set, deque)


def _fill_back(
    container: Any, fill: Callable[[Any], None], items: Any, inner: list[Callable[[], None]]
) -> None:
    container.clear()
    fill(items)
    _call(inner)


def _write_back(tensor: Tensor, before: Tensor) -> None:
    # Only a leaf can have been written to in place without being part of a graph.
    if tensor.is_leaf and tensor.shape == before.shape:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.detach().copy_(before)


def _call(restores: Sequence[Callable[[], None]]) -> None:
    for restore in restores:
        restore()


def _nothing() -> None:
    pass
