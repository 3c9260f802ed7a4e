"""The training program that the jobs in this folder start on every worker.

    python examples/jobs/train.py                        # one worker
    unisono launch -n 2 examples/jobs/train.py --checkpoint job.pt

It learns to add up numbers. Started again with the same checkpoint, it resumes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=int, default=5, help="number of epochs (default: 5)")
    parser.add_argument("--checkpoint", type=Path, help="a file that all workers can read")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    strategy = uo.MultiWorkerMirroredStrategy()  # finds the launcher and the other workers
    with strategy.scope():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    inputs = torch.randn(128, 4, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(dataset, batch_size=16, shuffle=True)  # 16 over all workers
    batches = strategy.experimental_distribute_dataset(loader)

    first_epoch, loss = 0, float("nan")
    saved: dict[str, Any] = {"model": model, "optimizer": optimizer, "input": batches}
    if options.checkpoint is not None and options.checkpoint.exists():
        state = torch.load(options.checkpoint)  # every worker loads
        for name, part in saved.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["random"])
        first_epoch = state["epoch"]

    for epoch in range(first_epoch, options.epochs):
        for batch in batches:
            losses = strategy.run(step, args=batch)
            loss = strategy.reduce("MEAN", losses).item()
        if strategy.is_chief:  # one worker prints and saves
            count = strategy.num_replicas_in_sync
            print(f"epoch {epoch + 1}, {count} replicas: loss {loss:.6f}", flush=True)
            if options.checkpoint is not None:
                state = {name: part.state_dict() for name, part in saved.items()}
                state |= {"random": torch.get_rng_state(), "epoch": epoch + 1}
                unfinished = options.checkpoint.with_suffix(".new")
                torch.save(state, unfinished)
                os.replace(unfinished, options.checkpoint)
    strategy.close()
    return loss


if __name__ == "__main__":
    main()
