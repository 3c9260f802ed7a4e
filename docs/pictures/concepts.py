"""The pictures of docs/concepts.md."""

from __future__ import annotations

from canvas import Canvas
from matplotlib.figure import Figure

REPLICA_FILLS = ("first", "second", "third", "fourth")


def draw_strategy() -> Figure:
    """A program, its strategy, and what happens in `run`."""
    canvas = Canvas(86, 48)
    canvas.box(24, 40, 38, 6, "your program: model, optimizer, step", fill="program", bold=True)
    canvas.text(43, 37, "strategy.run(step, args=(batch,))", size=10)
    for i, x in enumerate((4, 34, 64)):
        canvas.arrow((43, 35.5), (x + 9, 31))
        canvas.box(x, 14, 18, 17, fill=REPLICA_FILLS[i])
        canvas.text(x + 9, 28.5, f"replica {i}", bold=True)
        canvas.text(x + 9, 25, f"device cpu:{i}, a thread", size=9)
        canvas.text(x + 9, 21, "its part of the batch\nits loss, its gradients", size=9)
        canvas.text(x + 9, 16.5, "step(...)", size=9)
        canvas.arrow((x + 9, 14), (43, 9))
    canvas.arrow((22, 22), (34, 22), both=True)
    canvas.arrow((52, 22), (64, 22), both=True)
    canvas.text(28, 23.6, "all_reduce", size=9, gray=True)
    canvas.text(58, 23.6, "all_reduce", size=9, gray=True)
    canvas.box(26, 3, 34, 6, "PerReplica(loss 0, loss 1, loss 2)", fill="program")
    return canvas.figure


def draw_values() -> Figure:
    """Per-replica and mirrored values: equal values have one color."""
    canvas = Canvas(92, 32)
    canvas.text(22, 29, "PerReplica", bold=True, size=12)
    canvas.text(22, 25.6, "may differ: a loss, a batch, a gradient", size=9, gray=True)
    canvas.text(70, 29, "Mirrored", bold=True, size=12)
    canvas.text(70, 25.6, "always the same: a reduced gradient", size=9, gray=True)
    for i, name in enumerate(("0.8", "0.5", "1.1")):
        canvas.box(2 + 14 * i, 14, 12, 8, name, fill=REPLICA_FILLS[i], size=12)
        canvas.text(8 + 14 * i, 11.6, f"replica {i}", size=9)
    canvas.text(22, 7, "one value per replica:", size=9)
    canvas.text(22, 4, "value.values, value.devices", size=9, bold=True)
    for i in range(3):
        canvas.box(50 + 14 * i, 14, 12, 8, "0.8", fill="first", size=12)
        canvas.text(56 + 14 * i, 11.6, f"replica {i}", size=9)
    canvas.text(70, 7, "equal, so usable as one tensor:", size=9)
    canvas.text(70, 4, "value + 1, torch.sum(value)", size=9, bold=True)
    canvas.line((46, 2), (46, 30))
    return canvas.figure


def draw_tree() -> Figure:
    """The order of a sum over seven replicas."""
    canvas = Canvas(80, 44)
    places = {str(i): (7.0 + 11 * i, 6) for i in range(7)}
    nodes = [
        ("0 + 1", "0", "1", 16),
        ("2 + 3", "2", "3", 16),
        ("4 + 5", "4", "5", 16),
        ("(0 + 1) + (2 + 3)", "0 + 1", "2 + 3", 26),
        ("(4 + 5) + 6", "4 + 5", "6", 26),
        ("sum", "(0 + 1) + (2 + 3)", "(4 + 5) + 6", 36),
    ]
    for name, left, right, y in nodes:
        x = (places[left][0] + places[right][0]) / 2
        places[name] = (x, y)
        for child in (left, right):
            child_x, child_y = places[child]
            canvas.arrow((child_x, child_y + 2.5), (x, y - 2.5))
    for name, (x, y) in places.items():
        is_leaf = y == 6
        width = 6 if is_leaf else 4 + 0.95 * len(name)
        text = f"g{name}" if is_leaf else name
        fill = "first" if is_leaf else "meeting"
        canvas.box(x - width / 2, y - 2.5, width, 5, text, fill=fill, size=9)
    canvas.text(40, 1.6, "the gradient of each replica", size=9, gray=True)
    return canvas.figure


def draw_packs() -> Figure:
    """Two replicas over time: a pack and the layer whose gradients it holds have one color."""
    canvas = Canvas(96, 33)
    for replica, y, forward in ((0, 18, 18), (1, 8, 20)):
        canvas.text(6, y + 3, f"replica {replica}", bold=True)
        canvas.box(12, y, forward, 6, "forward", fill="plain")
        x = 12 + forward
        for pack in range(3):
            fill = REPLICA_FILLS[pack]
            canvas.box(x, y, 11, 6, f"backward\nlayer {3 - pack}", fill=fill, size=8.5)
            x += 11
            if replica == 1:
                canvas.box(x, y, 7, 6, f"reduce\npack {pack + 1}", fill=fill, size=8, bold=True)
                x += 7
        if replica == 0:
            canvas.box(x, y, 86 - x, 6, "waits for pack 3", size=8.5, dashed=True)
        canvas.box(86, y, 8, 6, "step", fill="program", size=9)
    canvas.arrow((12, 4), (94, 4))
    canvas.text(52, 2, "time", size=9, gray=True)
    canvas.text(
        52,
        29.5,
        "The last replica to fill a pack reduces it. The others go on.",
        size=9,
    )
    return canvas.figure


def draw_workers() -> Figure:
    """Replicas in workers in hosts, and how they exchange data."""
    canvas = Canvas(96, 46)
    for host in range(2):
        left = 2 + 48 * host
        canvas.box(left, 6, 44, 37, dashed=True)
        canvas.text(left + 22, 40.5, f"host {host}", bold=True)
        for place in range(2):
            worker = 2 * host + place
            x = left + 2 + 21 * place
            canvas.box(x, 19, 19, 19, fill="program")
            canvas.text(x + 9.5, 35.5, f"worker {worker}: a process", size=9, bold=True)
            for i in range(2):
                replica = 2 * worker + i
                canvas.box(x + 1 + 9 * i, 22, 8, 10, f"replica\n{replica}", fill="first", size=9)
            canvas.arrow((x + 9.5, 19), (x + 9.5, 15), both=True)
        canvas.box(
            left + 2, 9, 40, 6, "shared memory with packs of gradients", fill="meeting", size=9
        )
    canvas.arrow((44, 12), (52, 12), both=True)
    canvas.text(
        48, 3, "between hosts: Gloo, TCP, MPI or NCCL; each slice is sent once", size=9, gray=True
    )
    return canvas.figure
