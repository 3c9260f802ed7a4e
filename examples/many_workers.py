"""Trains on handwritten digits with any number of workers, and survives failures.

    python examples/many_workers.py                                         # one worker
    unisono launch -n 4 examples/many_workers.py
    torchrun --nproc-per-node 4 --max-restarts 3 examples/many_workers.py --checkpoint digits.pt

With a checkpoint, a restarted run resumes where it stopped. After any number of failures, it ends
with the same bits as a run without failures. The bits depend only on the total number of replicas,
not on how they are divided among workers.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo


class Training:
    """A model, its optimizer and its input, which can be saved and loaded together."""

    def __init__(self, strategy: uo.Strategy) -> None:
        self.strategy = strategy
        self.num_steps = 0
        torch.manual_seed(1)
        with strategy.scope():
            self.model = nn.Sequential(
                nn.Conv2d(1, 8, 3, padding=1),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Dropout(0.1),
                nn.Linear(8 * 4 * 4, 10),
            )
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        digits = load_digits()
        images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
        dataset = TensorDataset(images, torch.tensor(digits.target))
        order = torch.Generator().manual_seed(2)
        # 1797 digits: the last batch of an epoch is smaller.
        loader = DataLoader(dataset, batch_size=96, shuffle=True, generator=order)
        self.batches = strategy.experimental_distribute_dataset(loader)
        self.checkpoint = uo.experimental.Checkpoint(
            model=self.model, optimizer=self.optimizer, input=self.batches, progress=self
        )

    def step(self, images: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self, num_steps: int, checkpoint: Path | None, every: int) -> float:
        """Trains until step `num_steps`, and returns the last loss."""
        loss = float("nan")
        while self.num_steps < num_steps:
            for inputs in self.batches:
                results = self.strategy.run(self.step, args=inputs)
                loss = float(self.strategy.reduce("MEAN", results))
                self.num_steps += 1
                if checkpoint is not None and self.num_steps % every == 0:
                    self.checkpoint.save(checkpoint)  # all workers call it, and one writes
                if self.num_steps == num_steps:
                    break
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Returns what the checkpoint does not know otherwise."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]

    def digest(self) -> str:
        """Returns a hash of all bits of the model."""
        state = self.model.state_dict()
        content = b"".join(value.numpy().tobytes() for value in state.values())
        return hashlib.sha256(content).hexdigest()[:16]


def main(arguments: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--replicas", type=int, default=1, help="CPU replicas per worker (default: 1)"
    )
    parser.add_argument("--steps", type=int, default=40, help="number of steps (default: 40)")
    parser.add_argument("--checkpoint", type=Path, help="save to this file, and resume from it")
    parser.add_argument("--every", type=int, default=5, help="steps between saves (default: 5)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    strategy = uo.MultiWorkerMirroredStrategy(
        communication_options=uo.experimental.CommunicationOptions(timeout_seconds=60),
        devices=[f"cpu:{i}" for i in range(options.replicas)],
    )
    training = Training(strategy)
    if options.checkpoint is not None and options.checkpoint.exists():
        training.checkpoint.restore(options.checkpoint)
    loss = training.run(options.steps, options.checkpoint, options.every)
    digest = training.digest()
    if strategy.is_chief:
        print(f"{strategy.num_replicas_in_sync} replicas, loss {loss:.6f}, bits {digest}")
    strategy.close()
    return digest


if __name__ == "__main__":
    main()
