"""The order of GPU work that several threads start.

GPU work runs in the current stream of the thread that starts it. Replicas may use different
streams, so a stream that uses another's results must wait for that stream. The host never waits.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from unisono.torch_private import raw_stream


class Trail:
    """The streams with work that another thread will continue."""

    def __init__(self) -> None:
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}

    def note(self, place: torch.device) -> None:
        """Notes the current stream of this thread, if it is on a GPU."""
        if place.type == "cuda":
            key = place.index, raw_stream(place.index)
            if key not in self._streams:
                self._streams[key] = torch.cuda.current_stream(place)

    def follow(self) -> bool:
        """Makes later work of this thread wait for the noted streams."""
        if not self._streams:
            return False
        others = [
            stream
            for (index, raw), stream in self._streams.copy().items()
            if raw_stream(index) != raw
        ]
        for stream in others:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        return bool(others)


def lend(tensors: Iterable[torch.Tensor]) -> None:
    """Keeps the memory of tensors of another stream until this thread's stream is done."""
    for tensor in tensors:
        if tensor.layout is torch.sparse_coo:
            lend((tensor._indices(), tensor._values()))
        elif tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
