"""What all drawn pictures have in common: boxes, arrows, colors, and one style."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK = "#1a237e"
GRAY = "#546e7a"
FILLS = {
    "program": "#e8eaf6",
    "first": "#bbdefb",
    "second": "#ffe0b2",
    "third": "#c8e6c9",
    "fourth": "#f8bbd0",
    "meeting": "#fff9c4",
    "plain": "#eceff1",
}

# Text becomes outlines, so that it looks the same everywhere; its words stay in comments.
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "svg.fonttype": "path",
    "svg.hashsalt": "unisono",
    "figure.facecolor": "white",
}


class Canvas:
    """A sheet of `width` by `height` units, ten to the inch, with the origin at the lower left."""

    def __init__(self, width: float, height: float) -> None:
        self.figure = Figure(figsize=(width / 10, height / 10))
        self._axes = self.figure.add_axes((0, 0, 1, 1))
        self._axes.set_xlim(0, width)
        self._axes.set_ylim(0, height)
        self._axes.axis("off")

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str = "",
        *,
        fill: str = "plain",
        size: float = 10,
        bold: bool = False,
        dashed: bool = False,
    ) -> None:
        """Draws a box whose lower left corner is at `x`, `y`, with its text in the middle."""
        self._axes.add_patch(
            FancyBboxPatch(
                (x, y),
                width,
                height,
                boxstyle="round,pad=0,rounding_size=0.8",
                facecolor="none" if dashed else FILLS[fill],
                edgecolor=GRAY if dashed else INK,
                linestyle=(0, (4, 3)) if dashed else "-",
                linewidth=1.1,
            )
        )
        self.text(x + width / 2, y + height / 2, text, size=size, bold=bold)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 10,
        bold: bool = False,
        gray: bool = False,
        align: str = "center",
    ) -> None:
        """Writes `text` at `x`, `y`: its middle, or its left or right end as `align` says."""
        self._axes.text(
            x,
            y,
            text,
            ha=align,
            va="center",
            fontsize=size,
            color=GRAY if gray else "black",
            fontweight="bold" if bold else "normal",
            linespacing=1.35,
        )

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], *, both: bool = False
    ) -> None:
        """Draws an arrow, with a head at each end if `both`."""
        self._axes.add_patch(
            FancyArrowPatch(
                start,
                end,
                arrowstyle="<|-|>" if both else "-|>",
                mutation_scale=11,
                color=INK,
                linewidth=1.2,
                shrinkA=0,
                shrinkB=0,
            )
        )

    def line(self, *points: tuple[float, float]) -> None:
        """Draws a line through the points."""
        self._axes.plot(*zip(*points, strict=True), color=INK, linewidth=1.2)
