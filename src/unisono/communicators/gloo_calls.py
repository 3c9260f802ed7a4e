"""Sends and receives through Gloo that torch's profiler does not see.

The profiler would be told at the end of a message, which may come long after the profiler has
ended. That crashes the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._C._autograd import _enable_record_function, _profiler_enabled


def send(group: Any, data: Tensor, rank: int, tag: int) -> Any:
    """Begins to send, and returns the work of Gloo."""
    return _unseen(group.send, data, rank, tag)


def receive(group: Any, room: Tensor, rank: int, tag: int) -> Any:
    """Begins to receive, and returns the work of Gloo."""
    return _unseen(group.recv, room, rank, tag)


def _unseen(call: Callable[..., Any], tensor: Tensor, rank: int, tag: int) -> Any:
    if not _profiler_enabled():
        return call([tensor], rank, tag)
    _enable_record_function(False)  # noqa: FBT003
    try:
        return call([tensor], rank, tag)
    finally:
        _enable_record_function(True)  # noqa: FBT003
