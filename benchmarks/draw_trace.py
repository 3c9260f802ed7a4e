"""Draws some steps of a recorded run, for a page or a talk.

    UNISONO_TRACE=folder unisono launch -n 2 train.py
    python benchmarks/draw_trace.py folder traces.png --first 4 --steps 2

One row per thread. The color of a moment is that of the innermost span in it, and gray where that
waits for another replica or worker.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from unisono.tracing import Thread, Trace
from unisono_tools.traces.segments import Block, Segments, blocks, split

COLORS = {
    "compute": "#4c78a8",
    "communication": "#f58518",
    "waiting": "#d9d9d9",
    "input": "#54a24b",
}
KINDS = {
    "replica": "compute",
    "merge": "compute",
    "reduce": "communication",
    "copy": "communication",
    "collective": "communication",
    "wait": "waiting",
    "input": "input",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the run was recorded")
    parser.add_argument("picture", type=Path, help="the file to draw into")
    parser.add_argument("--first", type=int, default=1, help="the first step (default: 1)")
    parser.add_argument("--steps", type=int, default=2, help="how many steps (default: 2)")
    arguments = parser.parse_args()
    trace = Trace(arguments.folder)
    workers = trace.workers()
    wanted = range(arguments.first, arguments.first + arguments.steps)
    steps = [event for event in workers[0].events() if event.arguments.get("step") in wanted]
    blocked = blocks(workers)
    rows = [(worker, thread) for worker in workers for thread in worker.threads]
    figure = Figure(figsize=(9, 0.8 + 0.45 * len(rows)), layout="constrained")
    axis = figure.subplots()
    for row, (worker, thread) in enumerate(rows):
        for kind, start, length in pieces(
            thread, blocked[worker.rank], steps[0].start, steps[-1].end
        ):
            place = ((start - steps[0].start) / 1e6, length / 1e6)
            axis.broken_barh([place], (row - 0.4, 0.8), color=COLORS[kind], linewidth=0)
    axis.set_yticks(range(len(rows)), titles(trace.timeline()))
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds")
    axis.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(arguments.picture, dpi=120)


def pieces(
    thread: Thread, blocked: Sequence[Block], start: int, end: int
) -> Iterator[tuple[str, int, int]]:
    """Yields what a thread did between two moments: kind, start and length."""
    for piece in Segments(thread.events).within(start, end):
        kind = KINDS.get(piece.event.category)
        if kind == "communication":
            now = piece.start
            for length, rank in split(piece.start, piece.end, blocked):
                yield kind if rank is None else "waiting", now, length
                now += length
        elif kind is not None:
            yield kind, piece.start, piece.end - piece.start


def titles(timeline: dict[str, Any]) -> list[str]:
    """Returns what the threads are called, in the order of the rows."""
    named = [event for event in timeline["traceEvents"] if event["name"] == "thread_name"]
    return [f"worker {event['pid']}, {event['args']['name']}" for event in named]


if __name__ == "__main__":
    main()
