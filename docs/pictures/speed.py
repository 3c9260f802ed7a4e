"""The picture of the README: training steps against peers, from docs/performance.md."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

PAGE = Path(__file__).parents[1] / "performance.md"
PEERS = {"captured": "#7986cb", "DDP": "#ef6c00", "TensorFlow graph": "#6d4c41"}
OURS = "#1a237e"
# What a column is called in the picture, which also stands alone.
NAMES = {
    "captured": "captured step",
    "DDP": "DDP over Gloo",
    "TensorFlow graph": "TensorFlow, graph mode",
}


def read_table(text: str) -> list[dict[str, str]]:
    """Returns the rows of the table of training steps by the titles of its columns."""
    lines = iter(text.splitlines())
    header = next((line for line in lines if line.startswith("| model |")), None)
    if header is None:
        raise LookupError(f"{PAGE.name} has no table whose first column is `model`.")
    titles = cells(header)
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(titles, cells(line), strict=True)))
    return rows


def cells(line: str) -> list[str]:
    """Returns the cells of a row of a Markdown table."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def draw() -> Figure:
    """Bars of how long a step takes in each, in units of the time of Unisono."""
    rows = read_table(PAGE.read_text())
    figure = Figure(figsize=(8.6, 3.9))
    axes = figure.add_axes((0.07, 0.15, 0.91, 0.66))
    width = 0.8 / (len(PEERS) + 1)
    bars = {"Unisono": ["1"] * len(rows)}
    bars |= {peer: [row[peer] for row in rows] for peer in PEERS}
    for number, (name, ratios) in enumerate(bars.items()):
        places = [i + (number - len(PEERS) / 2) * width for i in range(len(rows))]
        heights = [float(ratio) for ratio in ratios]
        axes.bar(
            places, heights, width * 0.94, label=NAMES.get(name, name), color=PEERS.get(name, OURS)
        )
        for place, height, ratio in zip(places, heights, ratios, strict=True):
            # Above the line of Unisono's own time, which would strike it out.
            above = max(height, 1) if height > 0.85 else height
            axes.text(place, above + 0.04, ratio, ha="center", fontsize=8)
    axes.axhline(1, color=OURS, linewidth=0.8, linestyle=":", zorder=0)
    axes.set_xticks(range(len(rows)), [f"{row['model']}\n{row['unisono']}" for row in rows])
    axes.tick_params(axis="x", length=0, labelsize=9)
    axes.set_ylabel("time of a step, Unisono = 1")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        "Two replicas on 2 cores of an AMD EPYC CPU, no GPU: lower is faster", fontsize=11, pad=24
    )
    axes.legend(ncols=len(bars), loc="lower center", bbox_to_anchor=(0.5, 0.99), frameon=False)
    return figure
