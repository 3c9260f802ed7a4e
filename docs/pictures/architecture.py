"""The pictures of docs/architecture.md and docs/how_it_works.md."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from canvas import Canvas
from matplotlib.figure import Figure

RULE = Path(__file__).parents[2] / "tests" / "test_architecture.py"


FILLS = {"many workers": "second", "captured steps": "third", "other interfaces": "plain"}


def read(name: str) -> Any:
    """Returns the table of that name in the test of the import rule."""
    for node in ast.parse(RULE.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise LookupError(f"{RULE} has no {name}; the import rule must be there.")


def draw_layers() -> Figure:
    """The packages, each above those that it may import."""
    group_of = {package: name for name, group in read("GROUPS").items() for package in group}
    layers, tools = read("LAYERS"), read("TOOL_LAYERS")
    # Small enough that the picture fits on one screen.
    pitch, height = 4.3, 3.5
    top = 6 + pitch * len(layers)
    canvas = Canvas(112, top + 4)
    for level, packages in enumerate(layers):
        width = 82 / len(packages)
        for i, package in enumerate(packages):
            x, y = 6 + i * width, 6 + pitch * level
            fill = FILLS.get(group_of.get(package, ""), "first")
            canvas.box(x, y, width - 1, height, package, fill=fill, size=9)
    # The tools of one line stand below each other, with a gap before the next line.
    gap = pitch * (len(layers) - sum(map(len, tools))) / (len(tools) - 1)
    y = top
    for line in reversed(tools):
        for package in line:
            y -= pitch
            canvas.box(92, y, 19, height, package, fill="meeting", size=9)
        y -= gap
    canvas.text(47, top + 2, "unisono", size=10, bold=True)
    canvas.text(101.5, top + 2, "unisono_tools", size=10, bold=True)
    canvas.arrow((2.5, top - 1), (2.5, 6))
    canvas.text(47, 4, "a package imports only packages on lower lines", size=9, gray=True)
    for i, (name, fill) in enumerate({"the core": "first", **FILLS}.items()):
        canvas.box(6 + i * 20.5, 0.5, 2, 2, fill=fill)
        canvas.text(9 + i * 20.5, 1.5, name, size=9, align="left")
    return canvas.figure


def draw_step() -> Figure:
    """One training step on two replicas that share a memory."""
    canvas = Canvas(90, 62)
    canvas.box(26, 55, 38, 5.5, "strategy.run(step, args=(x, y))", fill="program", bold=True)
    for i, (x, fill) in enumerate(((6, "first"), (58, "second"))):
        middle = x + 13
        canvas.arrow((45, 55), (middle, 51.5))
        canvas.box(x, 46, 26, 5.5, f"replica {i}: a thread", fill=fill, bold=True)
        canvas.arrow((middle, 46), (middle, 43.5))
        canvas.box(x, 38, 26, 5.5, f"model(x{i}) uses copy {i}", fill=fill, size=9)
        canvas.arrow((middle, 38), (middle, 35.5))
        canvas.box(x, 30, 26, 5.5, f"leaf {i}, with .grad = g{i}", fill=fill, size=9)
        canvas.arrow((middle, 30), (middle, 27.5))
        canvas.box(x, 22, 26, 5.5, "backward fills packs", fill=fill, size=9)
        canvas.arrow((middle, 22), (middle, 19.5))
        canvas.box(x, 14, 26, 5.5, "optimizer.step()", fill=fill, size=9)
        canvas.arrow((middle, 14), (45, 7.5))
    canvas.box(35, 29, 20, 7.5, "weights: one storage", fill="meeting", size=9)
    canvas.arrow((32, 32.75), (35, 32.75), both=True)
    canvas.arrow((55, 32.75), (58, 32.75), both=True)
    canvas.box(35, 21, 20, 7.5, "full pack:\nmean(g0, g1)", fill="meeting", size=9)
    canvas.arrow((32, 24.75), (35, 24.75), both=True)
    canvas.arrow((55, 24.75), (58, 24.75), both=True)
    canvas.box(35, 13, 20, 7.5, "one thread updates\nthe weights", fill="meeting", size=9)
    canvas.arrow((32, 16.75), (35, 16.75), both=True)
    canvas.arrow((55, 16.75), (58, 16.75), both=True)
    canvas.box(31, 2, 28, 5.5, "PerReplica(loss 0, loss 1)", fill="program", size=9.5)
    return canvas.figure
