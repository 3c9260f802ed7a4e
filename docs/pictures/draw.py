"""Draws the pictures of the documentation.

    python docs/pictures/draw.py            # all of them, beside this file
    python docs/pictures/draw.py speed      # one
    python docs/pictures/draw.py --as png --into /tmp/look

`speed` is drawn from a table of docs/performance.md, `all_reduce` and `reduce` from
docs/measurements, and `layers` from tests/test_architecture.py. A test fails if a picture differs
from its script.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import architecture
import choosing
import concepts
import matplotlib
import measured
import native
import speed
from canvas import STYLE
from matplotlib.figure import Figure

PICTURES: dict[str, Callable[[], Figure]] = {
    "all_reduce": measured.draw_all_reduce,
    "choosing": choosing.draw,
    "layers": architecture.draw_layers,
    "packs": concepts.draw_packs,
    "reduce": measured.draw_reduce,
    "segment": native.draw_segment,
    "speed": speed.draw,
    "step": architecture.draw_step,
    "strategy": concepts.draw_strategy,
    "tree": concepts.draw_tree,
    "values": concepts.draw_values,
    "workers": concepts.draw_workers,
}


def draw(name: str, folder: Path, suffix: str = "svg") -> Path:
    """Draws one picture into a folder, without a date in it, and returns its path."""
    path = folder / f"{name}.{suffix}"
    with matplotlib.rc_context(STYLE):
        PICTURES[name]().savefig(path, metadata={"Date": None} if suffix == "svg" else None)
    return path


def main() -> None:
    """Draws what the command line asks for."""
    parser = argparse.ArgumentParser(description="Draws the pictures of the documentation.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)}")
    parser.add_argument("--as", dest="suffix", default="svg", help="svg (default) or png")
    parser.add_argument("--into", type=Path, default=Path(__file__).parent, help="the folder")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(PICTURES))
    if unknown:
        parser.error(f"no picture is called {', '.join(unknown)}; there are {', '.join(PICTURES)}")
    options.into.mkdir(parents=True, exist_ok=True)
    for name in options.names or PICTURES:
        print(draw(name, options.into, options.suffix))


if __name__ == "__main__":
    main()
