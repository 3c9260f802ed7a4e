"""Measures copies, sums and all-reduces of several sizes."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch

from unisono.communicators import Communicator
from unisono.devices import default_devices, this_machine
from unisono.kernels import reduce_batch, reduce_into
from unisono.options import ReduceOp
from unisono_tools.processes import one_thread
from unisono_tools.tuning.measured import Measured

Work: TypeAlias = Callable[[], object]

_TURNS = 9


def local_sweep(sizes: Sequence[int], seconds: float) -> Iterator[Measured]:
    """Measures sums in the memory of the first device, and copies from it to the second.

    Args:
        sizes: How many bytes a tensor has.
        seconds: How long to measure each size.
    """
    machine = this_machine()
    places = [machine.torch_device(device) for device in default_devices()]
    first, second = places[0], places[1 % len(places)]
    with one_thread():
        yield from _local_sweep(first, second, sizes, seconds)


def _local_sweep(
    first: torch.device, second: torch.device, sizes: Sequence[int], seconds: float
) -> Iterator[Measured]:
    for num_bytes in sizes:
        own, other = (torch.zeros(num_bytes // 4, device=first) for _ in range(2))
        there = torch.zeros(num_bytes // 4, device=second)
        reduce = _settled(functools.partial(_sum_in_place, (own, other)), first)
        copy = _settled(functools.partial(there.copy_, own), first)
        yield Measured("memory", 1, num_bytes, _median(reduce, _repeats(reduce, seconds)))
        yield Measured("devices", 1, num_bytes, _median(copy, _repeats(copy, seconds)))


def all_reduce_sweep(
    link: str, communicator: Communicator, sizes: Sequence[int], seconds: float
) -> Iterator[Measured]:
    """Measures sums between all ranks, each of which calls this.

    Args:
        link: The name of the link.
        communicator: Connects the ranks.
        sizes: How many bytes a tensor has.
        seconds: How long to measure each size.
    """
    for num_bytes in sizes:
        tensor = communicator.allocate(num_bytes).view(torch.float32)
        tensor.zero_()

        def reduce(tensor: torch.Tensor = tensor) -> None:
            communicator.all_reduce(ReduceOp.SUM, [tensor])

        # All ranks must make the same number of calls; the first rank decides.
        repeats = torch.tensor([_repeats(reduce, seconds)])
        communicator.broadcast(repeats)
        yield Measured(link, communicator.size, num_bytes, _median(reduce, int(repeats.item())))


def _sum_in_place(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    if not reduce_into(ReduceOp.SUM, [pair], [pair]):
        reduce_batch(ReduceOp.SUM, [pair], [2])


def _settled(work: Work, place: torch.device) -> Work:
    """Returns work that has finished when it returns, also on a GPU."""
    if place.type != "cuda":
        return work

    def settled() -> None:
        work()
        torch.cuda.synchronize()

    return settled


def _repeats(work: Work, seconds: float) -> int:
    """Returns how often to repeat work in each turn; trials bring it into the caches."""
    usual = statistics.median(_seconds(work, 1) for _ in range(_TURNS))
    return max(1, int(seconds / _TURNS / max(usual, 1e-7)))


def _median(work: Work, repeats: int) -> float:
    return statistics.median(_seconds(work, repeats) for _ in range(_TURNS))


def _seconds(work: Work, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats
