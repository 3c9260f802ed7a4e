"""Programs that make their updates in unusual ways."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo
from programs.generative import numbers
from programs.language import words
from programs.running import Learned, program


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches_for(strategy: Any, batch_size: int = 4, num_samples: int = 10) -> Any:
    dataset = TensorDataset(numbers(num_samples, 6), words(num_samples, high=3))
    return strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=batch_size))


@program()
def optimizer_in_backward(strategy: Any) -> Learned:
    """After torch's tutorial: each parameter is updated as soon as its gradient is there."""
    with strategy.scope():
        model = network()
        optimizer_dict = {p: torch.optim.Adam([p], foreach=False) for p in model.parameters()}

    def optimizer_hook(parameter: Tensor) -> None:
        optimizer_dict[parameter].step()  # type: ignore[index]
        optimizer_dict[parameter].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(optimizer_hook)

    def step(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward()

    for batch in batches_for(strategy):
        strategy.run(step, args=batch)
    return model.state_dict()


@program()
def dp_sgd(strategy: Any) -> Learned:
    """The gradient of each sample is clipped. Noise, drawn before, makes their mean private."""
    with strategy.scope():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    noise = [numbers(*p.shape, seed=9) * 0.01 for p in model.parameters()]

    def step(x: Tensor, y: Tensor) -> None:
        parameters = list(model.parameters())
        total = [torch.zeros_like(p) for p in parameters]
        for sample, label in zip(x, y, strict=True):
            loss = F.cross_entropy(model(sample[None]), label[None])
            gradients = torch.autograd.grad(loss, parameters)
            norm = torch.stack([g.norm() for g in gradients]).norm()
            for t, g in zip(total, gradients, strict=True):
                t.add_(g * (0.3 / norm).clamp(max=1.0))
        optimizer.zero_grad()
        for p, t, n in zip(parameters, total, noise, strict=True):
            p.grad = t / len(x) + n
        optimizer.step()

    for batch in batches_for(strategy):
        strategy.run(step, args=batch)
    return model.state_dict()


@program()
def dp_sgd_vectorized(strategy: Any) -> Learned:
    """The gradients of all samples at once, by `torch.func`."""
    with strategy.scope():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def loss_of(weights: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, weights, (sample[None],)), label[None])

    def step(x: Tensor, y: Tensor) -> None:
        weights = {name: p.detach() for name, p in model.named_parameters()}
        gradients = vmap(grad(loss_of), in_dims=(None, 0, 0))(weights, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
        factors = (0.3 / norms).clamp(max=1.0)
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            p.grad = torch.einsum("n,n...->...", factors, gradients[name]) / len(x)
        optimizer.step()

    for batch in batches_for(strategy):
        strategy.run(step, args=batch)
    return model.state_dict()


@program()
def gradient_accumulation(strategy: Any) -> Learned:
    """The gradients of two batches make one update."""
    with strategy.scope():
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: Tensor, y: Tensor, *, is_last: bool) -> None:
        (F.cross_entropy(model(x), y) / 2).backward()
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

    for number, batch in enumerate(batches_for(strategy, num_samples=14)):
        is_last = number % 2 == 1
        strategy.run(lambda x, y, is_last=is_last: step(x, y, is_last=is_last), args=batch)
    return model.state_dict()


@program()
def lbfgs(strategy: Any) -> Learned:
    """After pytorch/examples/time_sequence_prediction; the search looks at losses, too."""
    with strategy.scope():
        model = network()
        optimizer = torch.optim.LBFGS(
            model.parameters(), lr=0.8, max_iter=6, line_search_fn="strong_wolfe"
        )

    def step(x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss: Tensor = optimizer.step(closure)
        return loss

    losses = [
        strategy.reduce("MEAN", strategy.run(step, args=batch)).detach()
        for batch in batches_for(strategy, batch_size=7, num_samples=14)
    ]
    return {**model.state_dict(), "losses": torch.stack(losses)}


@program()
def moved_weights(strategy: Any) -> Learned:
    """Weights get other memory, and some are frozen, between a backward pass and its update."""
    with strategy.scope():
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def decay() -> None:
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 0.9, model.parameters())

    def step(x: Tensor, y: Tensor, *, is_last: bool) -> None:
        F.cross_entropy(model(x), y).backward()
        uo.once(decay)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(2):
        for number, (x, y) in enumerate(batches_for(strategy)):
            strategy.run(functools.partial(step, is_last=number == 2), args=(x, y))
            decay()
            model[0].requires_grad_(number == 2)
    return model.state_dict()
