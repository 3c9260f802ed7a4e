"""The memories of the replicas, each with its own stream and its own graphs.

A CUDA graph that torch captures is of one GPU. So replicas on several GPUs become one graph for
each GPU, and whatever passes between the GPUs happens between two graphs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from unisono.sharing import computed_once


class Lane:
    """One memory: where its graphs are captured, and which replicas are in them."""

    def __init__(self, place: torch.device, number: int, replica_ids: list[int]) -> None:
        self.place = place
        self.replica_ids = replica_ids
        self.stream = _stream_on(place, number)
        self._pool: Any = None
        self._anchor: torch.cuda.CUDAGraph | None = None

    @property
    def pool(self) -> Any:
        """The memory pool of all graphs."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            # A pool ends with its last graph, so one stays that does nothing of use.
            self._anchor = torch.cuda.CUDAGraph()
            with torch.cuda.stream(self.stream):
                self._anchor.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                torch.zeros(1, device=self.place)
                self._anchor.capture_end()
        return self._pool


class Lanes:
    """The memories of all replicas of this worker."""

    def __init__(self, memories: Sequence[Hashable], places: Sequence[torch.device]) -> None:
        found: dict[Hashable, list[int]] = {}
        for replica_id, memory in enumerate(memories):
            found.setdefault(memory, []).append(replica_id)
        firsts = [places[replica_ids[0]] for replica_ids in found.values()]
        self.all = [
            Lane(place, firsts[:i].count(place), replica_ids)
            for i, (place, replica_ids) in enumerate(zip(firsts, found.values(), strict=True))
        ]
        of_replica = {i: lane for lane in self.all for i in lane.replica_ids}
        self.are_several = len(self.all) > 1
        self.streams = [of_replica[i].stream for i in range(len(places))] * self.are_several

    @contextmanager
    def current(self) -> Iterator[None]:
        """Within the block this thread uses the streams of the lanes."""
        # One for each GPU.
        firsts = list({lane.place: lane.stream for lane in reversed(self.all)}.values())
        self.fork()
        with ExitStack() as stack:
            for stream in firsts:
                stack.enter_context(torch.cuda.stream(stream))
            yield
            self.join()
        for stream in firsts:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def fork(self) -> None:
        """Orders what the lanes do next after what this thread has started."""
        for lane in self.all:
            _follow(lane.stream, torch.cuda.current_stream(lane.place))

    def join(self) -> None:
        """Orders what this thread starts next after what the lanes do."""
        for lane in self.all:
            _follow(torch.cuda.current_stream(lane.place), lane.stream)

    def synchronize(self) -> None:
        """Waits for all work of their GPUs."""
        for place in dict.fromkeys(lane.place for lane in self.all):
            torch.cuda.synchronize(place)


def _follow(later: torch.cuda.Stream, earlier: torch.cuda.Stream) -> None:
    if later != earlier:
        later.wait_stream(earlier)


@computed_once
def _stream_on(place: torch.device, number: int) -> torch.cuda.Stream:
    """Returns the stream of all captures in a memory. cuBLAS keeps memory for each that it sees."""
    return torch.cuda.Stream(place)
