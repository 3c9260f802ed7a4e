"""Trains a GAN: two networks, two optimizers and two backward passes per step.

    python examples/gan.py
    python examples/gan.py --replicas 4 --epochs 5

Real points come from eight Gaussians on a ring. A generator learns to draw such points, and a
critic learns to tell them from real ones. At the end, at least 80 % of 1,000 generated points are
within 0.3 of the ring, near at least five of the eight Gaussians. Each replica draws its own noise,
which is the same in every run.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import unisono as uo

NUM_MODES, RADIUS, SPREAD = 8, 2.0, 0.1
NUM_NOISE = 8
STEPS_PER_EPOCH = 100
BATCH_SIZE = 256


class Quality(NamedTuple):
    """The share of generated points near the ring, and the number of Gaussians that they reach."""

    near: float
    num_modes: int


def network(num_inputs: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(num_inputs, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, 64),
        nn.LeakyReLU(0.2),
        nn.Linear(64, num_outputs),
    )


def ring(num_points: int) -> Tensor:
    """Draws real points."""
    angles = torch.randint(NUM_MODES, (num_points,)) * (2 * math.pi / NUM_MODES)
    centers = RADIUS * torch.stack([angles.cos(), angles.sin()], dim=1)
    return centers + SPREAD * torch.randn(num_points, 2)


def judge(points: Tensor) -> Quality:
    angles = torch.atan2(points[:, 1], points[:, 0]) * NUM_MODES / (2 * math.pi)
    is_near = (points.norm(dim=1) - RADIUS).abs() < 0.3
    is_at_mode = is_near & ((angles - angles.round()).abs() < 0.2)
    hits = torch.bincount(angles[is_at_mode].round().long() % NUM_MODES, minlength=NUM_MODES)
    return Quality(float(is_near.double().mean()), int((hits >= len(points) / 100).sum()))


def train(strategy: uo.Strategy, num_epochs: int) -> Quality:
    torch.manual_seed(0)
    loader: DataLoader[Tensor] = DataLoader(
        ring(STEPS_PER_EPOCH * BATCH_SIZE),  # type: ignore[arg-type]
        batch_size=BATCH_SIZE,
        shuffle=True,
    )
    batches = strategy.experimental_distribute_dataset(loader)
    with strategy.scope():
        generator, critic = network(NUM_NOISE, 2), network(2, 1)
        generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
        critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.9))

    def step(real: Tensor) -> None:
        made = generator(torch.randn(len(real), NUM_NOISE))
        critic_optimizer.zero_grad()
        softplus = nn.functional.softplus
        mistakes = softplus(-critic(real)) + softplus(critic(made.detach()))
        mistakes.mean().backward()
        critic_optimizer.step()

        generator_optimizer.zero_grad()
        softplus(-critic(made)).mean().backward()
        generator_optimizer.step()

    for epoch in range(num_epochs):
        for real in batches:
            strategy.run(step, args=(real,))
        with torch.no_grad():
            quality = judge(generator(torch.randn(1000, NUM_NOISE)))
        if (epoch + 1) % 5 == 0 or epoch + 1 == num_epochs:
            print(
                f"epoch {epoch + 1:2}: {quality.near:4.0%} of the points are near the ring, "
                f"{quality.num_modes} of {NUM_MODES} Gaussians are hit"
            )
    return quality


def main(arguments: Sequence[str] | None = None) -> Quality:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--replicas", type=int, default=2, help="number of replicas (default: 2)")
    parser.add_argument("--epochs", type=int, default=10, help="of 100 steps (default: 10)")
    options = parser.parse_args(arguments)
    strategy = uo.MirroredStrategy([f"cpu:{i}" for i in range(options.replicas)])
    quality = train(strategy, options.epochs)
    strategy.close()
    return quality


if __name__ == "__main__":
    main()
