"""Trains with a custom reduction that sends gradients as bfloat16, in half the bytes.

    python examples/own_reduction.py
    python examples/own_reduction.py --replicas 4 --epochs 5

`RoundedMean` is a `CrossDeviceOps` with one method, and `MirroredStrategy(cross_device_ops=...)`
uses it for every gradient. With bfloat16, the final loss is within 10 % of the loss with float32.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo
from unisono.reductions import Destinations, Result

BATCH_SIZE = 64


class Outcome(NamedTuple):
    """The final loss, and the bytes that the replicas sent."""

    loss: float
    num_bytes: int


class RoundedMean(uo.CrossDeviceOps):
    """Rounds the value of each replica to `dtype`, and takes the mean."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.num_bytes = 0
        self._dtype = dtype
        # The replica that computes the last gradient of a pack reduces it: any thread may be here.
        self._lock = threading.Lock()

    def reduce_implementation(
        self,
        reduce_op: uo.ReduceOp,
        per_replica_value: uo.DistributedValues,
        destinations: Destinations,
        options: uo.experimental.CommunicationOptions,
    ) -> Result:
        rounded = [tensor.to(self._dtype) for tensor in per_replica_value.values]
        with self._lock:
            self.num_bytes += sum(tensor.nbytes for tensor in rounded)
        total = torch.stack([tensor.float() for tensor in rounded]).sum(dim=0)
        if reduce_op is uo.ReduceOp.MEAN:
            total /= len(rounded)
        return self.broadcast_implementation(total, destinations)


def train(ops: RoundedMean, num_replicas: int, num_epochs: int) -> Outcome:
    """Learns a wave of two variables. `ops` reduces the gradients."""
    torch.manual_seed(0)
    strategy = uo.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)], cross_device_ops=ops)
    points = torch.rand(2048, 2) * 4 - 2
    heights = torch.sin(points[:, :1] * 2) * torch.cos(points[:, 1:])
    order = torch.Generator().manual_seed(1)
    loader = DataLoader(TensorDataset(points, heights), BATCH_SIZE, shuffle=True, generator=order)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
        model.append(nn.Linear(128, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(points: Tensor, heights: Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(points), heights).backward()
        optimizer.step()

    for _ in range(num_epochs):
        for inputs in strategy.experimental_distribute_dataset(loader):
            strategy.run(step, args=inputs)
    strategy.close()
    with torch.no_grad():
        return Outcome(float(nn.functional.mse_loss(model(points), heights)), ops.num_bytes)


def main(arguments: Sequence[str] | None = None) -> tuple[Outcome, Outcome]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--replicas", type=int, default=2, help="number of replicas (default: 2)")
    parser.add_argument("--epochs", type=int, default=20, help="number of epochs (default: 20)")
    options = parser.parse_args(arguments)
    whole, half = (
        train(RoundedMean(dtype), options.replicas, options.epochs)
        for dtype in (torch.float32, torch.bfloat16)
    )
    print(f"float32:  loss {whole.loss:.6f}, {whole.num_bytes / 1e6:.1f} MB of gradients")
    print(f"bfloat16: loss {half.loss:.6f}, {half.num_bytes / 1e6:.1f} MB of gradients")
    return whole, half


if __name__ == "__main__":
    main()
