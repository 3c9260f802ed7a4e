"""The picture of docs/native_core.md."""

from __future__ import annotations

from canvas import Canvas
from matplotlib.figure import Figure


def draw_segment() -> Figure:
    """The layout of the memory that the ranks of a host share: one color per rank."""
    canvas = Canvas(98, 44)
    fills = ("first", "second", "third")
    canvas.text(49, 41.5, "one sealed memfd, mapped by every rank", bold=True)
    canvas.box(2, 22, 15, 16, fill="meeting")
    canvas.text(9.5, 35.5, "control", bold=True, size=9)
    canvas.text(9.5, 29, "futex\narrivals\nshared work\nfirst failure", size=8.5)
    canvas.text(28, 36, "one block per rank", size=9, bold=True)
    canvas.text(54, 36, "three 512 KB slots per rank", size=9, bold=True)
    canvas.text(83, 36, "one arena per rank", size=9, bold=True)
    for rank, fill in enumerate(fills):
        y = 30 - 4.5 * rank
        canvas.box(19, y, 18, 4, f"rank {rank}: call, progress", fill=fill, size=8.5)
        for slot in range(3):
            canvas.box(39 + 10 * slot, y, 9.5, 4, f"slot {slot}", fill=fill, size=8.5)
        canvas.box(71, y, 25, 4, f"packs of rank {rank}", fill=fill, size=8.5)
    canvas.text(28, 12.5, "its current call\nand its progress", size=8.5, gray=True)
    canvas.text(
        54,
        12.5,
        "plain tensors, copied in chunks:\none slot fills, one is summed, one is read",
        size=8.5,
        gray=True,
    )
    canvas.text(83, 12.5, "tensors from allocate(),\nsummed in place", size=8.5, gray=True)
    canvas.arrow((54, 10), (54, 6.5))
    canvas.arrow((83, 10), (83, 6.5))
    canvas.box(39, 1, 57, 5.5, "kernels: the tree sum over all ranks", fill="program", size=9)
    return canvas.figure
