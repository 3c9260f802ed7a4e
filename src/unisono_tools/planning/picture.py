"""The picture of `unisono plan`: time by size for each algorithm, and where the fastest changes."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from unisono.costs import Cluster
from unisono_tools.planning.predictions import crossovers, curves, sizes_up_to
from unisono_tools.tables import spell_bytes, spell_seconds


def draw(cluster: Cluster, model_bytes: float, path: Path) -> None:
    """Draws the predicted times up to `model_bytes`, both axes logarithmic."""
    sizes = sizes_up_to(model_bytes)
    by_name = curves(cluster, sizes)
    figure = Figure(figsize=(9, 6), layout="constrained")
    axis = figure.subplots()
    # As they stand above each other at the right, where the legend tells their times.
    for name, seconds in sorted(by_name.items(), key=lambda item: -item[1][-1]):
        axis.plot(sizes, seconds, label=f"{name}, {spell_seconds(seconds[-1])}", linewidth=1.5)
    for crossing in crossovers(by_name, sizes):
        point = crossing.num_bytes, crossing.seconds
        is_right = crossing.num_bytes**2 > sizes[0] * sizes[-1]
        axis.plot(*point, "ko", markersize=5, zorder=5)
        axis.annotate(
            f"{crossing.to}\nfrom {spell_bytes(crossing.num_bytes)}",
            point,
            xytext=(4, -14),
            textcoords="offset points",
            horizontalalignment="center" if is_right else "left",
            verticalalignment="top",
            fontsize=9,
        )
    axis.set(
        title=f"All-reduce, predicted: {cluster.num_hosts} hosts of {cluster.ranks_per_host}",
        xlabel="bytes of one rank's gradients",
        ylabel="seconds",
        xscale="log",
        yscale="log",
    )
    axis.margins(y=0.1)
    axis.grid(visible=True, which="major", alpha=0.3)
    axis.legend(title=f"algorithm, at {spell_bytes(model_bytes)}", loc="upper left")
    figure.savefig(path, dpi=120)
