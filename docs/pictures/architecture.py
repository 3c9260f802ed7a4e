"""The pictures of docs/architecture.md and docs/how_it_works.md."""

from __future__ import annotations

import ast
from pathlib import Path

from canvas import Canvas
from matplotlib.figure import Figure

RULE = Path(__file__).parents[2] / "tests" / "test_architecture.py"


def read_layers(name: str) -> list[list[str]]:
    """Returns the layers of that name in the test of the import rule, the lowest first."""
    for node in ast.parse(RULE.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            layers: list[list[str]] = ast.literal_eval(node.value)
            return layers
    raise LookupError(f"{RULE} has no {name}; the import rule must be there.")


def draw_layers() -> Figure:
    """The packages, each above those that it may import."""
    layers = read_layers("LAYERS")
    tools = [package for line in read_layers("TOOL_LAYERS") for package in line]
    canvas = Canvas(112, 7 * len(layers) + 10)
    for level, packages in enumerate(layers):
        y = 7 * level + 4
        width = 82 / len(packages)
        for i, package in enumerate(packages):
            canvas.box(6 + i * width, y, width - 1, 5.5, package, fill="first", size=9)
    for level, package in enumerate(reversed(tools)):
        y = 7 * (len(layers) - 1 - level) + 4
        canvas.box(92, y, 19, 5.5, package, fill="meeting", size=9)
    top = 7 * len(layers) + 6
    canvas.text(47, top, "unisono", size=10, bold=True)
    canvas.text(101.5, top, "unisono_tools", size=10, bold=True)
    canvas.arrow((2.5, 7 * len(layers) + 3), (2.5, 4))
    canvas.text(47, 2, "a package imports only packages on lower lines", size=9, gray=True)
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
