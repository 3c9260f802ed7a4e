"""A step frees all that it used when it ends, without the garbage collector.

What only the collector frees stays for many steps. On a GPU that is memory, and a child process
that collects it after a fork ends in an error of CUDA.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import unisono as uo

Make = Callable[..., uo.MirroredStrategy]


@pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(),
    reason="without the lock, the collector also finds what a thread has yet to free",
)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_training_leaves_no_garbage(mirrored: Make, num_replicas: int) -> None:
    strategy = mirrored(num_replicas)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout(0.1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(batch["x"]).square().mean()
        loss.backward()
        optimizer.step()
        uo.once(lambda: None)
        return loss.detach()

    data = [{"x": row} for row in torch.randn(24, 2)]
    loader = strategy.experimental_distribute_dataset(DataLoader(data, batch_size=8))  # type: ignore[arg-type]

    def epoch() -> None:
        for batch in loader:
            strategy.reduce("MEAN", strategy.run(step, args=(batch,)))

    # What another test has left may be freed meanwhile. What a step leaves is found every time.
    for _ in range(4):
        found = garbage_of(epoch)
        tensors = [one for one in found if isinstance(one, Tensor)]
        ours = [one for one in found if type(one).__module__.startswith("unisono")]
        if not tensors and not ours:
            return
    raise AssertionError(str({type(one).__name__ for one in found}))


def garbage_of(work: Callable[[], None]) -> list[object]:
    """Returns what only the garbage collector can free after some work."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        work()
        gc.collect()
        return list(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
