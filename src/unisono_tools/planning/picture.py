"""The picture of `unisono plan`: time over size for each algorithm, and the crossovers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axis import Axis
from matplotlib.figure import Figure

from unisono_tools.planning.model import Model
from unisono_tools.planning.predictions import crossovers, curves, sizes_up_to
from unisono_tools.tables import spell_bytes, spell_seconds


def draw(model: Model, model_bytes: float, path: Path) -> None:
    """Draws the predicted times up to `model_bytes`, both axes logarithmic."""
    sizes = sizes_up_to(model_bytes)
    by_name = curves(model, sizes)
    cluster = model.cluster
    figure = Figure(figsize=(9, 6), layout="constrained")
    axis = figure.subplots()
    # In the order of their right ends, whose times the legend shows.
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
        title=f"Predicted time of an all-reduce on {cluster.num_hosts} hosts with "
        f"{cluster.ranks_per_host} GPUs each",
        xlabel="size of all gradients",
        ylabel="time",
        xscale="log",
        yscale="log",
    )
    axis.margins(y=0.1)
    _mark(axis.xaxis, [2.0 ** (5 * power) for power in range(1, 11)], spell_bytes)
    _mark(
        axis.yaxis, [10.0**power for power in range(-7, 3)] + [3600, 36000, 360000], spell_seconds
    )
    axis.grid(visible=True, which="major", alpha=0.3)
    axis.legend(title=f"algorithm, at {spell_bytes(model_bytes)}", loc="upper left")
    figure.savefig(path, dpi=120)


def _mark(axis: Axis, values: Sequence[float], spell: Callable[[float], str]) -> None:
    """Labels a logarithmic axis at those of the values that it shows."""
    low, high = axis.get_view_interval()
    shown = [value for value in values if low <= value <= high]
    axis.set_ticks(shown, [spell(value) for value in shown])
    axis.set_ticks([], minor=True)
