"""A step as CUDA graphs, and between them the calls that Python makes at every replay.

A CUDA graph that torch captures is of one GPU. So replicas on several GPUs become one graph for
each GPU, and whatever passes between the GPUs happens between two graphs. Each memory has its own
stream and its own graphs.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unisono.engines import RunGenerators
from unisono.errors import CaptureError
from unisono.functions.gradients import Gradients, StartingGradients, trained_by
from unisono.kernels import TableArena
from unisono.sharing import computed_once
from unisono.values import tensors_of
from unisono.variables import Mirrors, Settings


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


@dataclass(eq=False)
class _Call:
    """A call that Python makes between two graphs; `gradients` returns those of the moment."""

    what: str
    work: Callable[[], Any]
    gradients: Callable[[], Gradients]

    def first(self) -> Any:
        """Makes the call while the step is captured; later ones write where its results are."""
        self.before = self.gradients()
        result = self.work()
        self._kept = tensors_of(result)
        self._after = self.gradients()
        return result

    def replay(self) -> None:
        """Makes the call again."""
        self.before.restore()
        found = tensors_of(self.work())
        self._after.take(self.what)
        if len(found) != len(self._kept):
            raise CaptureError(
                f"{self.what} returned {len(found)} tensors in a replay, but {len(self._kept)} "
                "when the step was captured. Return the same structure in every step."
            )
        for kept, new in zip(self._kept, found, strict=True):
            if kept is not new:
                kept.copy_(new)


@dataclass(eq=False)
class _Graphs:
    """The graphs of one part of a step, one for each memory in which it does something."""

    lanes: Lanes
    graphs: Sequence[tuple[Lane, torch.cuda.CUDAGraph]]

    def replay(self) -> None:
        """Starts the graphs: a single one on the stream of the caller, others on their own."""
        if not self.lanes.are_several:
            for _, graph in self.graphs:
                graph.replay()
            return
        self.lanes.fork()
        for lane, graph in self.graphs:
            with torch.cuda.stream(lane.stream):
                graph.replay()
        self.lanes.join()


class Recording:
    """Records one run.

    The run really happens: each graph is replayed as soon as it is captured, before Python makes
    the call that ends it.

    Args:
        drawn_from: The generators from which graphs draw new numbers at every replay, one for each
            replica; empty for a single replica.
        waiting: The updates of optimizers that do not become a part of the graphs, even if their
            settings allow it; None for all.
    """

    is_capturing = True

    def __init__(
        self,
        mirrors: Mirrors,
        generators: RunGenerators | None,
        drawn_from: Sequence[torch.Generator],
        lanes: Lanes,
        waiting: Collection[str] | None,
    ) -> None:
        self._mirrors = mirrors
        self.generators = generators
        self._drawn_from = drawn_from
        self._lanes = lanes
        self._pools = [lane.pool for lane in lanes.all]
        self.streams = lanes.streams
        # An update reaches the other memories by copies between GPUs, which no graph holds.
        self._waiting = None if lanes.are_several else waiting
        self._parts: list[_Call | _Graphs] = []
        self._open: list[tuple[Lane, torch.cuda.CUDAGraph]] = []
        self._arena = TableArena()
        self._trained = trained_by(mirrors)
        self._start = StartingGradients(mirrors, self._trained)
        self._end: Gradients | None = None
        self.settings: list[Settings] = []
        self.num_calls = 0
        self.is_random = True

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within the block the run is recorded; it is discarded if the block fails."""
        with self._arena.in_use(), _without_garbage():
            self._begin()
            try:
                yield
            except BaseException:
                self._abort()
                raise
            self._finish()
        self._start.find_used([one.before for one in self._parts if isinstance(one, _Call)])
        self._end = Gradients(self._mirrors, self._trained)
        # They started from 0, and every graph has been replayed once.
        has_drawn = any(generator.get_offset() for generator in self._drawn_from)
        self.is_random = has_drawn or self.num_calls > 0

    def refuse(self, reason: str) -> None:
        """Ends the capture of a step that does what its rehearsals did not."""
        raise CaptureError(
            f"The step did not do this in its first calls: {reason}. Make the step do the same "
            "in every call."
        )

    def call(self, what: str, work: Callable[[], Any], settings: Settings | None = None) -> Any:
        """Ends the graph so far, makes a call in Python, and begins the next graph."""
        takes_in = self._waiting is not None and what not in self._waiting
        if settings is not None and takes_in and settings.can_be_captured:
            self.settings.append(settings)
            return work()
        self._finish()
        call = _Call(what, work, lambda: Gradients(self._mirrors, self._trained))
        self._parts.append(call)
        self.num_calls += 1
        result = call.first()
        self._begin()
        return result

    def replay(self) -> None:
        """Does what the recorded run did."""
        self._start.fill()
        if not self.num_calls:
            self._replay_parts()
        else:
            self._mirrors.watch.stamp()
            self._mirrors.fronts.put_up()
            try:
                self._replay_parts()
            finally:
                self._mirrors.fronts.take_down()
        if self._end is not None:
            self._end.restore()

    def _replay_parts(self) -> None:
        for part in self._parts:
            part.replay()

    def _begin(self) -> None:
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

    def _finish(self) -> None:
        graphs = []
        while self._open:
            lane, graph = self._open.pop()
            with warnings.catch_warnings(record=True) as told, torch.cuda.stream(lane.stream):
                warnings.simplefilter("always")
                graph.capture_end()
            if not any("graph is empty" in str(one.message).lower() for one in told):
                graphs.append((lane, graph))
        if graphs:
            self._parts.append(_Graphs(self._lanes, graphs[::-1]))
            self._parts[-1].replay()

    def _abort(self) -> None:
        while self._open:
            lane, graph = self._open.pop()
            with contextlib.suppress(RuntimeError), torch.cuda.stream(lane.stream):
                graph.capture_end()
        self._start.restore()


@contextlib.contextmanager
def _without_garbage() -> Iterator[None]:
    """Within the block nothing is freed but what is let go of: an earlier graph would end this."""
    gc.collect()
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_enabled:
            gc.enable()
