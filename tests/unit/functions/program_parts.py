"""What the small trainings are made of: models, batches and the plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono as uo
from unisono.testing import separate_memories, virtual_gpus

# The devices that steps are captured on.
KINDS = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

Mark = Callable[[Callable[..., Any]], Callable[..., Any]]


Program = Callable[[uo.Strategy, Mark, int], Iterator[Any]]


NUM_STEPS = 9


@contextmanager
def replicas(
    kind: str, number: int, *, are_separate: bool = False
) -> Iterator[uo.MirroredStrategy]:
    """Yields a strategy, whose replicas may each have their own memory."""
    is_on_gpus = kind == "cuda"
    with (
        virtual_gpus(number) if is_on_gpus else nullcontext(),
        separate_memories() if are_separate else nullcontext(),
    ):
        strategy = uo.MirroredStrategy([f"{kind}:{i}" for i in range(number)])
        try:
            yield strategy
        finally:
            strategy.close()


def recordings(strategy: uo.Strategy) -> list[Any]:
    """Returns the recordings that a strategy has."""
    captures = strategy.extended._captures
    functions = () if captures is None else captures._functions.values()
    steps = [step for one in functions for step in one._steps.values()]
    return [capture.recording for step in steps for capture in step.captures]


def kind_of(strategy: uo.Strategy) -> str:
    """Returns where a strategy runs."""
    return "cpu" if strategy.extended.worker_devices[0].type == "cpu" else "cuda"


def convnet() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )


def with_dropout() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Dropout2d(0.3), nn.Flatten(), nn.Dropout(0.5), nn.Linear(8 * 36, 4)
    )


def batch(strategy: uo.Strategy, step: int, num_samples: int = 6) -> tuple[Any, Any]:
    where = kind_of(strategy)
    made = torch.Generator().manual_seed(step)
    num_replicas = strategy.num_replicas_in_sync
    first = strategy.extended.first_replica_id
    own = slice(first, first + len(strategy.extended.worker_devices))
    images = [
        torch.randn(num_samples, 3, 8, 8, generator=made).to(where) for _ in range(num_replicas)
    ]
    labels = [
        torch.randint(4, (num_samples,), generator=made).to(where) for _ in range(num_replicas)
    ]
    return uo.PerReplica(images[own]), uo.PerReplica(labels[own])


def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(images), labels)


def learn(model: nn.Module, optimizer: Any, images: Tensor, labels: Tensor) -> Tensor:
    """Changes the weights once, and returns the loss before."""
    optimizer.zero_grad()
    loss = loss_of(model, images, labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


class Plain:
    """A training loop: what is made, and one step."""

    def __init__(self, make_optimizer: Callable[..., Any], make_model: Any = convnet) -> None:
        self.make_optimizer = make_optimizer
        self.make_model = make_model

    def __call__(self, strategy: uo.Strategy, mark: Mark, num_steps: int) -> Iterator[Any]:
        with strategy.scope():
            model = self.make_model()
            optimizer = self.make_optimizer(model.parameters())

        @mark
        def step(images: Tensor, labels: Tensor) -> Tensor:
            return learn(model, optimizer, images, labels)

        for i in range(num_steps):
            yield strategy.run(step, args=batch(strategy, i))
        yield model.state_dict()


class Codebook(nn.Module):
    """A large buffer that is no vector, of which torch's count of writes is all that is known."""

    def __init__(self, *, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.table: Tensor
        self.scale: Tensor
        self.replaced: Tensor
        self.register_buffer("table", torch.ones(200, 192))
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("replaced", torch.ones(192))

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        if self.training:
            self.table.mul_(0.9).add_(flat.detach().mean(0))
            new = self.replaced * 0.5 + flat.detach().mean(0)
            if self.replaces:
                self.replaced = new
            else:
                self.replaced.copy_(new)
        return (flat * self.scale + self.replaced) @ self.table.T
