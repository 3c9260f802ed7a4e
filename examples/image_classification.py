"""Trains an image classifier the way torchvision's reference script does, on all GPUs.

    python examples/image_classification.py                       # all GPUs, or one CPU replica
    python examples/image_classification.py --replicas 2 --epochs 3
    python examples/image_classification.py --checkpoint run.pt   # start it again to resume

The images are made up, so nothing is downloaded. Put your own dataset into `datasets` and your own
model, for example `torchvision.models.resnet50()`, into `main`. The step is wrapped in
`unisono.function`: on GPUs it is captured as CUDA graphs and replayed, on CPUs it runs as it is.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo

NUM_CLASSES = 4


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Returns images with a bright quarter, for training and for validation."""
    dice = torch.Generator().manual_seed(0)
    made = []
    for num_images in (512, 130):
        labels = torch.randint(NUM_CLASSES, (num_images,), generator=dice)
        images = torch.randn(num_images, 3, 16, 16, generator=dice)
        for label, image in zip(labels.tolist(), images, strict=True):
            row, column = 8 * (label // 2), 8 * (label % 2)
            image[:, row : row + 8, column : column + 8] += 0.7
        made.append(TensorDataset(images, labels))
    return made[0], made[1]


class Block(nn.Module):
    """Two convolutions with a shortcut, as in a ResNet."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width // stride, width, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(width // stride, width, 1, stride, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width) for _ in range(3)])

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.norms[0](self.first(images)))
        return F.relu(self.norms[1](self.second(hidden)) + self.norms[2](self.shortcut(images)))


def small_resnet() -> nn.Module:
    """Returns a ResNet for images of 16 x 16."""
    stem = [nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    blocks = [Block(16, stride=2), Block(32, stride=2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten()).append(
        nn.Linear(128, NUM_CLASSES)
    )


def warmup_then_cosine(epoch: int, num_epochs: int) -> float:
    """Returns a tenth in the first epoch, then half a cosine wave from 1 down to 0."""
    if epoch == 0:
        return 0.1
    return (1 + math.cos(math.pi * (epoch - 1) / max(num_epochs - 1, 1))) / 2


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--replicas", type=int, help="CPU replicas (default: all GPUs)")
    parser.add_argument("--epochs", type=int, default=5, help="number of epochs (default: 5)")
    parser.add_argument("--batch-size", type=int, default=64, help="over all replicas (64)")
    parser.add_argument("--lr", type=float, default=0.05, help="highest learning rate (0.05)")
    parser.add_argument("--checkpoint", type=Path, help="save to this file, and resume from it")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    devices = None if options.replicas is None else [f"cpu:{i}" for i in range(options.replicas)]
    strategy = uo.MirroredStrategy(devices)
    with strategy.scope():
        model: nn.Module = small_resnet()
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(
            model.parameters(), options.lr, momentum=0.9, nesterov=True, weight_decay=1e-4
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda epoch: warmup_then_cosine(epoch, options.epochs)
        )

    @uo.function
    def train_step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(images.device.type, torch.bfloat16):
            images = images.to(memory_format=torch.channels_last)
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        return loss.detach()

    @uo.function
    def validation_step(images: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            is_right: Tensor = model(images).argmax(1) == labels
        return is_right.float()  # one number per image

    train, validation = datasets()
    train_loader = DataLoader(train, options.batch_size, shuffle=True, drop_last=True)
    batches = strategy.experimental_distribute_dataset(train_loader)
    validation_batches = strategy.experimental_distribute_dataset(
        DataLoader(validation, options.batch_size)
    )
    saved: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "input": batches,
    }
    first_epoch, accuracy = 0, 0.0
    if options.checkpoint is not None and options.checkpoint.exists():
        state = torch.load(options.checkpoint, map_location="cpu")
        for name, part in saved.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["random"])
        first_epoch, accuracy = state["epoch"], state["accuracy"]

    for epoch in range(first_epoch, options.epochs):
        start = time.perf_counter()
        model.train()
        # The sum stays on the device. `float` waits for the device, so it is called once per epoch.
        total: Tensor | float = 0.0
        for batch in batches:
            losses = strategy.run(train_step, args=batch)
            total = total + strategy.reduce("MEAN", losses)
        scheduler.step()
        loss = float(total) / len(batches)
        seconds = time.perf_counter() - start

        model.eval()
        num_right = 0.0
        for batch in validation_batches:
            is_right = strategy.run(validation_step, args=batch)
            num_right += strategy.reduce("SUM", is_right, axis=0).item()
        accuracy = num_right / len(validation)
        print(
            f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.3f}, "
            f"{len(batches) * options.batch_size / seconds:.0f} images/s"
        )
        if options.checkpoint is not None:
            state = {name: part.state_dict() for name, part in saved.items()}
            state |= {"random": torch.get_rng_state(), "epoch": epoch + 1, "accuracy": accuracy}
            unfinished = options.checkpoint.with_suffix(".new")
            torch.save(state, unfinished)
            os.replace(unfinished, options.checkpoint)
    strategy.close()
    return accuracy


if __name__ == "__main__":
    main()
