"""Reductions of R replicas on one host, against torch, TensorFlow and the memory limit.

Every competitor is run in turn within one process; ratios are those of medians: how many times the
time of Unisono the competitor needs. GB/s counts all bytes that are read and written.

stack.sum   torch.stack and a sum
add chain   one tensor added after another
foreach     the same for a whole batch, with torch's fused loops
limit       torch reads all inputs and fills all outputs: 1.0 means that nothing is left to win,
            less that the reduction is slower than the memory
TF          batch_reduce of TensorFlow's ReductionToOneDevice on logical CPUs, eager and in a graph
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import unisono as uo
from unisono_tools.benchmarks.failure import BenchmarkError
from unisono_tools.benchmarks.peers.coprocess import CoProcess
from unisono_tools.benchmarks.peers.shapes import RESNET50
from unisono_tools.benchmarks.rows import Row, mark_powers_of_two, mark_sizes, spell_bytes
from unisono_tools.benchmarks.timing import Series, Work, take_turns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = tuple(2**power for power in range(10, 29, 2))
QUICK_SIZES = (2**12, 2**18, 2**22, 2**26)
REPLICAS = (2, 4, 8)
BATCHES = {"300 x 4 KB": [1024] * 300, "ResNet-50": RESNET50}
NUM_ROUNDS = 3
# TensorFlow keeps its tensors besides ours.
MAX_TENSORFLOW_BYTES = 2**27

Item = list[Tensor]


@dataclass(frozen=True)
class ReduceSweep:
    """Sums of float32 tensors, and of two whole batches, into one output and into all replicas.

    Attributes:
        sizes: The bytes of one replica's tensor.
        replicas: The numbers of replicas.
        batches: Which of `BATCHES` are reduced besides.
        seconds: The time of one measurement.
        tensorflow: An interpreter that has TensorFlow.
    """

    sizes: Sequence[int] = SIZES
    replicas: Sequence[int] = REPLICAS
    batches: Sequence[str] = tuple(BATCHES)
    seconds: float = 0.6
    tensorflow: str | None = None
    name: str = "reduce"

    def __post_init__(self) -> None:
        if bad := [size for size in self.sizes if size < 4 or size % 4]:
            raise ValueError(f"Sizes must be multiples of 4 bytes, got {bad}.")
        if min(self.replicas) < 2:
            raise ValueError(f"Replicas must be 2 or more, got {list(self.replicas)}.")

    @property
    def num_measurements(self) -> int:
        """See `Sweep`."""
        return (len(self.sizes) + len(self.batches)) * len(self.replicas) * 2

    @property
    def left_out(self) -> Sequence[str]:
        """See `Sweep`."""
        return [] if self.tensorflow else ["TensorFlow (give --tensorflow PYTHON)"]

    def measurements(self) -> Generator[Sequence[Row], None, None]:
        """See `Sweep`."""
        cases = {spell_bytes(size): [size // 4] for size in self.sizes}
        cases |= {name: BATCHES[name] for name in self.batches}
        with ExitStack() as stack:
            peer = None
            if self.tensorflow:
                peer = CoProcess("TensorFlow", self.tensorflow, "tensorflow_reduce.py")
                stack.enter_context(closing(peer))
            for case, lengths in cases.items():
                for num_replicas in self.replicas:
                    for into in ("one", "all"):
                        yield [self._measure(case, lengths, num_replicas, into, peer)]

    def _measure(
        self, case: str, lengths: list[int], num_replicas: int, into: str, peer: CoProcess | None
    ) -> Row:
        items = [[torch.randn(length) for _ in range(num_replicas)] for length in lengths]
        num_bytes = 4 * sum(lengths)
        works = competitors(items, into)
        check(case, items, works["unisono"]())
        series: dict[str, Series] = {}
        request = {"sizes": lengths, "replicas": num_replicas, "into": into, "repeats": 5}
        for _ in range(NUM_ROUNDS):
            turns = take_turns(works, budget_s=self.seconds / NUM_ROUNDS)
            if peer is not None and num_replicas * num_bytes <= MAX_TENSORFLOW_BYTES:
                answer = peer.ask(request)
                turns |= {"TF eager": [answer["eager_s"]], "TF graph": [answer["graph_s"]]}
            for name, times in turns.items():
                series.setdefault(name, []).extend(times)
        moved = num_bytes * (num_replicas + (num_replicas if into == "all" else 1))
        return Row.compare(
            {"case": case, "replicas": num_replicas, "into": into},
            num_bytes,
            series.pop("unisono"),
            series,
            lambda seconds: {"GB/s": moved / seconds / 1e9},
        )

    def summary(self, rows: Sequence[Row]) -> str:
        """See `Sweep`."""
        return ""

    def draw(self, figure: Figure, rows: Sequence[Row]) -> None:
        """Draws the speed relative to the add chain, a line per number of replicas."""
        from matplotlib import colormaps

        figure.set_size_inches(10, 4)
        axes = figure.subplots(1, 2, sharey=True)
        for axis, into in zip(axes, ("one", "all"), strict=True):
            for number, num_replicas in enumerate(self.replicas, 1):
                case = {"replicas": num_replicas, "into": into}
                line = [row for row in rows if case.items() <= row.case.items()]
                line = [row for row in line if row.case["case"] not in BATCHES]
                ratios = [row.ratios["add chain"] for row in line]
                sizes = [row.num_bytes for row in line]
                # The more replicas, the darker the line.
                shade = colormaps["Blues"](0.25 + 0.75 * number / len(self.replicas))
                axis.plot(sizes, ratios, marker="o", label=f"{num_replicas} replicas", color=shade)
            axis.axhline(1, color="gray", linewidth=1)
            axis.set(xscale="log", yscale="log", xlabel="size of one replica's tensor")
            axis.set_title("into one output" if into == "one" else "into all replicas")
            mark_sizes(axis)
            mark_powers_of_two(axis.yaxis, lambda ratio: f"{ratio:g}x")
            axis.grid(visible=True, which="major", alpha=0.3)
        axes[0].set_ylabel("speed; a chain of torch additions is 1x")
        axes[0].legend()


def competitors(items: list[Item], into: str) -> dict[str, Work]:
    """Returns everything that reduces `items`, one list of tensors a value, into one or all."""
    copies = len(items[0]) if into == "all" else 1
    values = [uo.PerReplica(item) for item in items]
    pairs = [(value, value if into == "all" else "cpu:0") for value in values]
    ops = uo.ReductionToOneDevice()
    outputs = [[torch.empty_like(item[0]) for _ in range(copies)] for item in items]
    works: dict[str, Work] = {"unisono": lambda: ops.batch_reduce(uo.ReduceOp.SUM, pairs)}
    if len(items) == 1:
        works["unisono"] = lambda: [ops.reduce(uo.ReduceOp.SUM, *pairs[0])]
        works["stack.sum"] = lambda: _copied([torch.stack(items[0]).sum(0)], copies)
    works["add chain"] = lambda: [_copied([_add_chain(item)], copies) for item in items]
    works["foreach"] = lambda: _foreach(items, copies)
    works["limit"] = lambda: _read_and_fill(items, outputs)
    return works


def check(case: str, items: list[Item], results: Any) -> None:
    """Raises if the results are not the sums of the items, within float32."""
    for item, result in zip(items, results, strict=True):
        expected = _add_chain(item)
        for copy in result.values if isinstance(result, uo.Mirrored) else (result,):
            if not torch.allclose(copy, expected, rtol=1e-5, atol=1e-5):
                worst = float((copy - expected).abs().max())
                raise BenchmarkError(
                    f"{case}: a sum over {len(item)} replicas is wrong by {worst:g}. Please report "
                    "this."
                )


def _add_chain(item: Item) -> Tensor:
    total = item[0] + item[1]
    for tensor in item[2:]:
        total += tensor
    return total


def _copied(totals: Sequence[Tensor], copies: int) -> list[Tensor]:
    return [total.clone() for total in totals for _ in range(copies - 1)]


def _foreach(items: list[Item], copies: int) -> list[Tensor]:
    by_replica = list(zip(*items, strict=True))
    totals = torch._foreach_add(by_replica[0], by_replica[1])
    for tensors in by_replica[2:]:
        torch._foreach_add_(totals, tensors)
    return _copied(totals, copies)


def _read_and_fill(items: list[Item], outputs: list[Item]) -> None:
    for item in items:
        for tensor in item:
            torch.sum(tensor)
    for output in outputs:
        torch._foreach_zero_(output)
