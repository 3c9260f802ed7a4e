"""Trains a CNN on made images, with everything that a real training script has.

    python tests/newcomer/cnn.py --replicas 2 --folder /tmp/cnn

Written from the documentation alone: training, what a step means, metrics, checkpoints. Started
again with the same folder, it resumes where it stopped.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo

log = logging.getLogger("cnn")


def made_images(num_samples: int, seed: int) -> TensorDataset:
    """Squares that are bright on the left, at the top, or in the middle."""
    dice = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (num_samples,), generator=dice)
    images = torch.randn(num_samples, 1, 8, 8, generator=dice)
    images[labels == 0, :, :, :3] += 1.0
    images[labels == 1, :, :3, :] += 1.0
    images[labels == 2, :, 2:6, 2:6] += 1.0
    return TensorDataset(images, labels)


class Net(nn.Module):
    """Two convolutions with batch normalization and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.dropout = nn.Dropout(0.1)
        self.classes = nn.Linear(64, 3)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classes(self.dropout(self.features(images).flatten(1)))
        return scores


class Training:
    """All that a checkpoint holds, and the steps that change it."""

    def __init__(self, strategy: uo.Strategy, folder: Path, patience: int) -> None:
        self.strategy = strategy
        self.folder = folder
        self.patience = patience
        self.epoch, self.best_loss, self.bad_epochs = 0, float("inf"), 0
        self.history: list[dict[str, float]] = []
        torch.manual_seed(0)
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        with strategy.scope():
            self.model = Net()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
            self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.9)
            self.scaler = torch.amp.GradScaler(kind)
            self.train_loss = torchmetrics.MeanMetric()
            self.loss = torchmetrics.MeanMetric()
            self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        train = DataLoader(made_images(100, seed=1), batch_size=32, shuffle=True)
        validation = DataLoader(made_images(50, seed=2), batch_size=32)
        self.batches = strategy.experimental_distribute_dataset(train)
        self.validation = strategy.experimental_distribute_dataset(validation)

    def train_step(self, images: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(images), labels)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.train_loss.update(loss.detach(), weight=len(images))

    @torch.no_grad()
    def validation_step(self, images: Tensor, labels: Tensor) -> None:
        scores = self.model(images)
        self.loss.update(nn.functional.cross_entropy(scores, labels), weight=len(images))
        self.accuracy.update(scores, labels)

    def fit(self, num_epochs: int) -> None:
        while self.epoch < num_epochs and self.bad_epochs < self.patience:
            self.model.train()
            for batch in self.batches:
                self.strategy.run(self.train_step, args=batch)
            self.schedule.step()
            self.model.eval()
            for batch in self.validation:
                self.strategy.run(self.validation_step, args=batch)
            self.end_epoch()

    def end_epoch(self) -> None:
        self.epoch += 1
        found = {
            "epoch": self.epoch,
            "train_loss": self.train_loss.compute().item(),
            "loss": self.loss.compute().item(),
            "accuracy": self.accuracy.compute().item(),
            "lr": self.schedule.get_last_lr()[0],
        }
        for metric in (self.train_loss, self.loss, self.accuracy):
            metric.reset()
        self.history.append(found)
        is_best = found["loss"] < self.best_loss
        self.best_loss = min(found["loss"], self.best_loss)
        self.bad_epochs = 0 if is_best else self.bad_epochs + 1
        if self.strategy.is_chief:
            log.info(json.dumps(found))
            self.save("last.pt")
            if is_best:
                self.save("best.pt")

    def save(self, name: str) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "input": self.batches.state_dict(),
            "random": torch.get_rng_state(),
            "epoch": self.epoch,
            "best_loss": self.best_loss,
            "bad_epochs": self.bad_epochs,
            "history": self.history,
        }
        torch.save(state, self.folder / f"{name}.new")
        os.replace(self.folder / f"{name}.new", self.folder / name)

    def resume(self) -> None:
        state: dict[str, Any] = torch.load(self.folder / "last.pt")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        self.batches.load_state_dict(state["input"])
        torch.set_rng_state(state["random"])
        self.epoch, self.history = state["epoch"], state["history"]
        self.best_loss, self.bad_epochs = state["best_loss"], state["bad_epochs"]


def main(arguments: Sequence[str] | None = None) -> Training:
    parser = argparse.ArgumentParser(description="Trains a CNN on made images.")
    parser.add_argument("--replicas", type=int, default=0, help="CPU replicas (default: all GPUs)")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--patience", type=int, default=3, help="epochs without a better loss")
    parser.add_argument("--folder", type=Path, default=Path("."), help="of the checkpoints")
    options = parser.parse_args(arguments)
    devices = [f"cpu:{number}" for number in range(options.replicas)]
    strategy = uo.MirroredStrategy(devices or None)
    training = Training(strategy, options.folder, options.patience)
    if (options.folder / "last.pt").exists():
        training.resume()
    training.fit(options.epochs)
    strategy.close()
    return training


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main()
