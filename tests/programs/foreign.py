"""Programs as their authors write them: modules and optimizers that do more than torch's own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo
from programs.generative import numbers
from programs.running import Learned, program
from programs.updates import batches_for, network

QUEUE_SIZE = 20


class MoCo(nn.Module):
    """After facebookresearch/moco: the model updates its other encoder and its queue itself."""

    queue: Tensor
    queue_ptr: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder_q, self.encoder_k = network(), network()
        for param_q, param_k in zip(
            self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True
        ):
            param_k.data.copy_(param_q.data)
            param_k.requires_grad = False
        self.register_buffer("queue", F.normalize(numbers(3, QUEUE_SIZE), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self) -> None:
        for param_q, param_k in zip(
            self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True
        ):
            param_k.data = param_k.data * 0.9 + param_q.data * 0.1

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys: Tensor) -> None:
        begin = int(self.queue_ptr)
        self.queue[:, begin : begin + len(keys)] = keys.T
        self.queue_ptr[0] = (begin + len(keys)) % QUEUE_SIZE

    def forward(self, im_q: Tensor, im_k: Tensor) -> Tensor:
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            uo.once(self._momentum_update_key_encoder)
            k = F.normalize(self.encoder_k(im_k), dim=1)
        negatives = self.queue.clone().detach()
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ negatives], dim=1) / 0.07
        context = uo.get_replica_context()
        keys = k if context is None else context.all_gather(k, 0)
        uo.once(lambda: self._dequeue_and_enqueue(keys))
        return logits


@program()
def moco(strategy: Any) -> Learned:
    with strategy.scope():
        model = MoCo()
        optimizer = torch.optim.SGD(model.encoder_q.parameters(), 0.1, momentum=0.9)

    def step(im_q: Tensor, im_k: Tensor) -> Tensor:
        logits = model(im_q, im_k)
        loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    dataset = TensorDataset(numbers(10, 6), numbers(10, 6, seed=5))
    losses = [
        strategy.reduce("MEAN", strategy.run(step, args=batch))
        for _ in range(2)
        for batch in strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=4))
    ]
    return {**model.state_dict(), "losses": torch.stack(losses)}


class Lookahead(torch.optim.Optimizer):
    """After pytorch_optimizer: it wraps an optimizer, and is never made by `Optimizer.__init__`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._patch_step_function()
        self.defaults = optimizer.defaults
        self.slow: dict[Tensor, Tensor] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        for group in self.param_groups:
            group["counter"] = group.get("counter", 0) + 1
            for p in group["params"]:
                slow = self.slow.setdefault(p, p.clone())
                if group["counter"] % 2 == 0:
                    p.copy_(slow.lerp_(p, 0.5))
        return loss


class CountingSGD(torch.optim.SGD):
    """After facebookresearch/madgrad: the state has more than that of each parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.state["k"] = torch.tensor([0])  # type: ignore[index]
        self.state["rate"] = 1.0  # type: ignore[index]

    def step(self, closure: Any = None) -> Any:
        self.state["k"] += 1  # type: ignore[index]
        for group in self.param_groups:
            group["lr"] = 0.3 / self.state["k"].item()  # type: ignore[index]
        return super().step(closure)


def train_with(strategy: Any, make: Callable[[Iterable[nn.Parameter]], Any]) -> Learned:
    with strategy.scope():
        model = network()
        optimizer = make(model.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_((p for g in optimizer.param_groups for p in g["params"]), 0.5)
        optimizer.step()
        scheduler.step()

    for _ in range(3):
        for batch in batches_for(strategy):
            strategy.run(step, args=batch)
        optimizer.load_state_dict(optimizer.state_dict())
    return model.state_dict()


@program()
def lookahead_around_adam(strategy: Any) -> Learned:
    return train_with(strategy, lambda given: Lookahead(torch.optim.Adam(given, lr=0.05)))


@program()
def optimizer_that_counts(strategy: Any) -> Learned:
    return train_with(strategy, lambda given: CountingSGD(given, lr=0.3))


@program()
def physics_informed(strategy: Any) -> Learned:
    """After the PINNs: the loss has second derivatives with respect to the batch itself."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        u = model(x)
        (du,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
        (ddu,) = torch.autograd.grad(du, x, torch.ones_like(u), create_graph=True)
        loss: Tensor = (ddu + u).square().mean() + (u - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    dataset = TensorDataset(numbers(10, 1), numbers(10, 1, seed=5))
    losses = [
        strategy.reduce("MEAN", strategy.run(step, args=batch))
        for _ in range(4)
        for batch in strategy.experimental_distribute_dataset(DataLoader(dataset, batch_size=4))
    ]
    return {**model.state_dict(), "losses": torch.stack(losses)}


class Scaled(nn.Parameter):
    """A parameter with a method."""

    def value(self) -> Tensor:
        return self * 2


class Marked(nn.Module):
    """Parameters have a class and attributes, and the step moves the model where it is already."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Scaled(numbers(6, 3))
        self.bias = nn.Parameter(torch.zeros(3))
        self.weight.is_frozen, self.bias.is_frozen = False, True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x @ self.weight.value() + self.bias
        return out


@program()
def parameters_with_attributes(strategy: Any) -> Learned:
    with strategy.scope():
        model = Marked()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def step(x: Tensor, y: Tensor) -> None:
        model.to(x.device)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            if getattr(p, "is_frozen", False):
                p.grad = None
        optimizer.step()

    for is_frozen in (True, False, None):
        model.bias.is_frozen = is_frozen  # type: ignore[attr-defined]
        if is_frozen is None:
            del model.bias.is_frozen  # type: ignore[attr-defined]
            model.weight.is_frozen = True  # type: ignore[attr-defined]
        for batch in batches_for(strategy):
            strategy.run(step, args=batch)
    return model.state_dict()
