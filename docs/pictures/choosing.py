"""The flowchart of docs/choosing_a_reduction.md."""

from __future__ import annotations

from canvas import Canvas
from matplotlib.figure import Figure

# A question, and the choice if the answer is yes.
QUESTIONS = [
    ("Do you want your own algorithm,\nor a result other than a sum?", "your own CrossDeviceOps"),
    ("Do you need an accumulation_fn?", "ReductionToOneDevice"),
    ("Do all devices share one memory?\n(CPU replicas, one GPU)", "ReductionToOneDevice"),
    ("Are some devices CPUs\nand some GPUs?", "ReductionToOneDevice"),
    ("Must results be bit-identical\nto the other reductions?", "HierarchicalCopyAllReduce"),
    ("Does each replica have its own GPU,\nand is NCCL installed?", "NcclAllReduce"),
]
OTHERWISE = "HierarchicalCopyAllReduce"


def draw() -> Figure:
    """One question below the other; yes leads to the right, no leads on."""
    canvas = Canvas(78, 12 * len(QUESTIONS) + 10)
    y = 12.0 * len(QUESTIONS)
    for question, choice in QUESTIONS:
        canvas.box(2, y, 34, 7.5, question, fill="meeting", size=9.5)
        canvas.arrow((36, y + 3.75), (46, y + 3.75))
        canvas.text(41, y + 5.2, "yes", size=9, gray=True)
        canvas.box(46, y + 0.75, 30, 6, choice, fill="first", size=9.5, bold=True)
        canvas.arrow((19, y), (19, y - 4.5))
        canvas.text(21, y - 2, "no", size=9, gray=True, align="left")
        y -= 12
    canvas.box(2, y + 1.5, 34, 6, OTHERWISE, fill="first", size=9.5, bold=True)
    return canvas.figure
