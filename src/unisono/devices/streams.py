"""The order of GPU work that several threads start.

What a thread starts on a GPU waits in the thread's current stream. Replicas may have their own
streams, so where one goes on with what another has started, its stream must wait for the other's.
Nothing here waits on the host.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from unisono.torch_private import raw_stream


class Trail:
    """The streams on which work was started that somebody else will go on with.

    Several threads may note theirs while another follows.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}

    def note(self, place: torch.device) -> None:
        """Notes the current stream of this thread on a GPU; elsewhere there is none."""
        if place.type == "cuda":
            key = place.index, raw_stream(place.index)
            if key not in self._streams:
                self._streams[key] = torch.cuda.current_stream(place)

    def follow(self) -> bool:
        """Orders what this thread starts from now on after what was noted.

        Returns whether anything was noted on a stream that is not this thread's.
        """
        others = [
            stream
            for (index, raw), stream in self._streams.copy().items()
            if raw_stream(index) != raw
        ]
        for stream in others:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        return bool(others)


def lend(tensors: Iterable[torch.Tensor]) -> None:
    """Keeps the memory of tensors that came from another stream until this thread's is done."""
    for tensor in tensors:
        if tensor.layout is torch.sparse_coo:
            lend((tensor._indices(), tensor._values()))
        elif tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
