"""Captured work of replicas on GPUs: CUDA graphs.

A CUDA graph that torch captures is of one GPU. So replicas on several GPUs become one graph for
each GPU, and whatever passes between the GPUs happens between two graphs. Each memory has its own
stream and its own graphs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.errors import CommunicationError, UnequalCollectivesError
from unisono.functions.recording import Graphs, Part
from unisono.kernels.gpu import TableArena
from unisono.reductions import Workers
from unisono.sharing import computed_once

if TYPE_CHECKING:
    from unisono.communicators import GraphEngine

# What workers can agree on, besides the numbers of captures.
NOTHING, CAPTURE = 0, 1


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

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Within the block this thread uses the streams of the lanes."""
        # One for each GPU.
        firsts = list({lane.place: lane.stream for lane in reversed(self.all)}.values())
        self.fork()
        with contextlib.ExitStack() as stack:
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


class Together:
    """What all workers of a strategy capture together, with what they exchange in their graphs.

    NCCL's collectives may be in the graphs of all workers or of none. So before each call, the
    workers tell each other what they could do. If all could replay what they have captured
    together, they do, and if all could capture, they do. Otherwise each replays its own graphs, and
    Python exchanges between two of them.

    Attributes:
        engine: What carries the collectives in the graphs.
    """

    def __init__(self, workers: Workers, engine: GraphEngine) -> None:
        self.engine = engine
        self._workers = workers
        self._last = CAPTURE

    def agreed(self, number: int, can_capture: bool) -> int:  # noqa: FBT001
        """Returns what all workers do now.

        Args:
            number: Of the capture that this worker could replay; `NOTHING` if there is none.
        """
        self.engine.check_usable("A captured step")
        told = self._workers.gather(torch.tensor([number, can_capture]))
        numbers = {int(one[0]) for one in told}
        if numbers == {number} and number != NOTHING:
            return number
        return CAPTURE if all(one[1] for one in told) else NOTHING

    def next_number(self) -> int:
        """Returns the number of a capture that has just been made, on all workers."""
        self._last += 1
        return self._last

    def end_part(self) -> None:
        """Waits until all workers have captured a part; raises if one has failed."""
        self.engine.agree("the end of a capture")

    def has_failed(self, error: Exception) -> bool:
        """After an error in a capture: whether no worker can capture this, and all know it now."""
        if isinstance(error, UnequalCollectivesError):
            # All have got it. Perhaps one has told that it has failed.
            return True
        if isinstance(error, CommunicationError):
            return False
        with contextlib.suppress(UnequalCollectivesError):
            self.engine.agree("a failed capture")
        return True


@dataclass(eq=False)
class _Graphs(Part):
    """The graphs of one part of a step, one for each memory in which it does something."""

    lanes: Lanes
    graphs: Sequence[tuple[Lane, torch.cuda.CUDAGraph]]
    together: Together | None

    def free(self) -> None:
        """Gives back the memory of the graphs."""
        for _, graph in self.graphs:
            graph.reset()

    def replay(self) -> None:
        """Starts the graphs: a single one on the stream of the caller, others on their own."""
        if not self.lanes.are_several:
            for _, graph in self.graphs:
                graph.replay()
            if self.together is not None:
                self.together.engine.settle("a captured step")
            return
        self.lanes.fork()
        for lane, graph in self.graphs:
            with torch.cuda.stream(lane.stream):
                graph.replay()
        self.lanes.join()


class CudaGraphs(Graphs):
    """Captures one run of replicas on GPUs.

    Each graph is replayed as soon as it is captured: until then, nothing has happened.

    Args:
        drawn_from: The generators from which graphs draw new numbers at every replay, one for each
            replica; empty for a single replica.
        together: How all workers capture at the same time, if they do.
    """

    def __init__(
        self, lanes: Lanes, drawn_from: Sequence[torch.Generator], together: Together | None
    ) -> None:
        super().__init__(lanes.streams)
        self._lanes = lanes
        self._together = together
        self.is_joint = together is not None
        self._drawn_from = drawn_from
        self._pools = [lane.pool for lane in lanes.all]
        self.is_apart = lanes.are_several
        self._open: list[tuple[Lane, torch.cuda.CUDAGraph]] = []
        self._arena = TableArena()

    def in_use(self) -> contextlib.AbstractContextManager[None]:
        """Within the block, kernels keep their tables for the captures."""
        return self._arena.in_use()

    @property
    def has_drawn(self) -> bool:
        """Whether a replica has drawn random numbers."""
        # They started from 0, and every graph has been replayed once.
        return any(generator.get_offset() for generator in self._drawn_from)

    def begin(self) -> None:
        """Begins a part."""
        lanes = self._lanes
        lanes.fork()
        graphs = [(lane, torch.cuda.CUDAGraph()) for lane in lanes.all]
        for lane, graph in graphs:
            with torch.cuda.device(lane.place):
                for generator in (
                    self._drawn_from[i] for i in lane.replica_ids if self._drawn_from
                ):
                    graph.register_generator_state(generator)
        # Other threads launch into the streams that are captured, and torch's own may do other
        # work. What begins a second capture, such as an allocation, is forbidden in the first.
        mode = "relaxed" if lanes.are_several else "thread_local"
        for (lane, graph), pool in zip(graphs, self._pools, strict=True):
            with torch.cuda.stream(lane.stream):
                graph.capture_begin(pool=pool, capture_error_mode=mode)
            self._open.append((lane, graph))
        self._tell_engine()

    def finish(self, held: Sequence[Tensor] | None = None) -> _Graphs | None:
        """Ends a part, and returns its graphs, if something is in them."""
        graphs = []
        while self._open:
            lane, graph = self._open.pop()
            with warnings.catch_warnings(record=True) as told, torch.cuda.stream(lane.stream):
                warnings.simplefilter("always")
                graph.capture_end()
            if not any("graph is empty" in str(one.message).lower() for one in told):
                graphs.append((lane, graph))
        self._tell_engine()
        if self._together is not None:
            self._together.end_part()
        if not graphs:
            return None
        part = _Graphs(self._lanes, graphs[::-1], self._together)
        part.replay()
        return part

    def end(self) -> None:
        """Ends a part that has failed."""
        while self._open:
            lane, graph = self._open.pop()
            with contextlib.suppress(RuntimeError), torch.cuda.stream(lane.stream):
                graph.capture_end()
        self._tell_engine()

    def _tell_engine(self) -> None:
        """Says whether what the workers exchange becomes a part of a graph now."""
        if self._together is not None:
            self._together.engine.is_captured = bool(self._open)
