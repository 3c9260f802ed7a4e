"""Gradients that a step writes itself, its hooks, and uneven batches: as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import clip_grad_norm_

import unisono as uo
from unisono.errors import ContextError, UnsupportedError
from unisono.gradients.packs import Reduction
from unit.modules.test_once_calls import Program, X, Y, loss, net, same, split, weights

Make = Callable[..., uo.MirroredStrategy]


class PerSampleLoop(Program):
    """DP-SGD by hand: the gradient of each sample is clipped, one after another."""

    def step(self, x: Tensor, y: Tensor) -> None:
        parameters = list(self.model.parameters())
        total = [torch.zeros_like(p) for p in parameters]
        for one, target in zip(x, y, strict=True):
            grads = torch.autograd.grad(loss(self.model, one[None], target[None]), parameters)
            norm = torch.stack([g.norm() for g in grads]).norm()
            for whole, g in zip(total, grads, strict=True):
                whole += g * (0.5 / norm).clamp(max=1)
        for p, whole in zip(parameters, total, strict=True):
            p.grad = whole / len(x)
        self.optimizer.step()


class PerSampleBackward(Program):
    """The same with backward passes, which reduce nothing in `no_sync`."""

    def step(self, x: Tensor, y: Tensor) -> None:
        context = uo.get_replica_context()
        assert context is not None
        total = [torch.zeros_like(p) for p in self.model.parameters()]
        for one, target in zip(x, y, strict=True):
            with context.strategy.no_sync():
                self.backward(one[None], target[None])
            norm = clip_grad_norm_(self.model.parameters(), 0.5)
            assert norm > 0
            for whole, p in zip(total, self.model.parameters(), strict=True):
                assert p.grad is not None
                whole += p.grad
        for p, whole in zip(self.model.parameters(), total, strict=True):
            p.grad = whole / len(x)
        self.optimizer.step()


class PerSampleVmap(Program):
    """The same with torch.func, all samples at once."""

    def step(self, x: Tensor, y: Tensor) -> None:
        named = {name: p.detach() for name, p in self.model.named_parameters()}

        def one(parameters: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
            mean: Tensor = (functional_call(self.model, parameters, (a[None],)) - b).square().mean()
            return mean

        grads = vmap(grad(one), in_dims=(None, 0, 0))(named, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        factors = (0.5 / norms).clamp(max=1)
        for name, p in self.model.named_parameters():
            p.grad = torch.einsum("b,b...->...", factors, grads[name]) / len(x)
        self.optimizer.step()


class AddedTo(Program):
    """A penalty whose gradient is added to the reduced one, in place."""

    def step(self, x: Tensor, y: Tensor) -> None:
        self.backward(x, y)
        parameters = list(self.model.parameters())
        extra = torch.autograd.grad(self.model(x).abs().mean(), parameters)
        for p, g in zip(parameters, extra, strict=True):
            assert p.grad is not None
            p.grad.add_(g, alpha=0.3)
        self.optimizer.step()


class Replaced(Program):
    """The reduced gradient, replaced by one that is made of it."""

    def step(self, x: Tensor, y: Tensor) -> None:
        self.backward(x, y)
        for p in self.model.parameters():
            assert p.grad is not None
            p.grad = p.grad * 0.5
        self.optimizer.step()


class Clipped(Program):
    def step(self, x: Tensor, y: Tensor) -> None:
        self.backward(x, y)
        clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.optimizer.step()


class Alone(Program):
    """Only backward passes in `no_sync`, so that the update reduces their gradients."""

    def step(self, x: Tensor, y: Tensor) -> None:
        context = uo.get_replica_context()
        assert context is not None
        with context.strategy.no_sync():
            self.backward(x, y)
            loss(self.model, x, y + 1).backward()
        self.optimizer.step()


class Hooked(Program):
    """Hooks of parameters, one of which is made in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.model[0].weight.register_hook(lambda g: g * 2)  # type: ignore[index]
        self.model[2].weight.register_hook(lambda g: -g)  # type: ignore[index]

    def step(self, x: Tensor, y: Tensor) -> None:
        handle = self.model[2].bias.register_hook(lambda g: g * 3)  # type: ignore[index]
        self.backward(x, y)
        handle.remove()
        self.optimizer.step()


class InBackward(Program):
    """Each parameter has an optimizer, which makes its step in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Tensor] = []
        self.optimizers = {p: torch.optim.Adam([p], lr=0.1) for p in self.model.parameters()}
        for p in self.model.parameters():
            p.register_post_accumulate_grad_hook(self.update)

    def update(self, p: Tensor) -> None:
        self.calls.append(p)
        self.optimizers[p].step()  # type: ignore[index]
        self.optimizers[p].zero_grad()  # type: ignore[index]

    def step(self, x: Tensor, y: Tensor) -> None:
        loss(self.model, x, y).backward()
        assert all(p.grad is None for p in self.model.parameters())

    def result(self) -> list[Tensor]:
        assert len(self.calls) == 3 * len(self.optimizers)
        return weights(self.model)


PROGRAMS = [PerSampleLoop, PerSampleVmap, AddedTo, Replaced, Clipped, Hooked, InBackward]


def trained(strategy: uo.MirroredStrategy, program: type[Program], parts: Any) -> list[Tensor]:
    with strategy.scope():
        made = program()
    for _ in range(3):
        strategy.run(made.step, args=parts)
    return made.result()


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("program", [*PROGRAMS, Alone])
def test_replicas_end_with_the_weights_of_one_device(
    mirrored: Make, memories: str, program: type[Program], num_replicas: int
) -> None:
    expected = trained(mirrored(1), program, (X, Y))

    same(trained(mirrored(num_replicas), program, split(num_replicas)), expected)


def test_backward_passes_of_samples(mirrored: Make) -> None:
    expected = trained(mirrored(1), PerSampleBackward, (X, Y))

    same(trained(mirrored(2), PerSampleBackward, split(2)), expected)
    with pytest.raises(UnsupportedError, match=r"`0.weight` of Sequential.*torch.autograd.grad"):
        trained(mirrored(3), PerSampleBackward, split(3))


def test_accumulation_over_runs_with_uneven_batches(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    nn.init.zeros_(model.weight)

    def add(x: Tensor) -> None:
        with strategy.no_sync():
            model(x).mean().backward()

    def step(x: Tensor) -> None:
        model(x).mean().backward()
        optimizer.step()

    strategy.run(add, args=(uo.PerReplica([torch.ones(3, 1), torch.full((1, 1), 9.0)]),))
    strategy.run(step, args=(uo.PerReplica([torch.ones(1, 1), torch.full((1, 1), 3.0)]),))

    assert model.weight.item() == -(3 + 2)


@pytest.mark.parametrize("program", [Clipped, Program])
def test_reduced_gradients_are_not_reduced_again(
    mirrored: Make, program: type[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = mirrored(2)
    reduced: list[int] = []
    original = Reduction.reduce

    def counted(self: Reduction, owners: Any) -> None:
        reduced.append(len(owners))
        original(self, owners)

    monkeypatch.setattr(Reduction, "reduce", counted)
    with strategy.scope():
        made = program()

    def step(x: Tensor, y: Tensor) -> None:
        made.backward(x, y)
        if program is Clipped:
            clip_grad_norm_(made.model.parameters(), 0.1)
        made.optimizer.step()

    strategy.run(step, args=split(2))

    assert reduced == [4]


def test_a_sum_that_was_changed_in_different_ways_is_refused(mirrored: Make) -> None:
    strategy = mirrored(2, reduce_gradients=uo.ReduceOp.SUM)
    with strategy.scope():
        made = AddedTo()

    with pytest.raises(UnsupportedError, match=r"gradient of `0.weight` of Sequential"):
        strategy.run(made.step, args=split(2))


def test_a_sum_of_assigned_gradients(mirrored: Make) -> None:
    strategy = mirrored(2, reduce_gradients=uo.ReduceOp.SUM)
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    nn.init.zeros_(model.weight)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model.weight.grad = x
        optimizer.step()
        model.weight.grad = model.weight.grad * 0
        optimizer.step()

    strategy.run(step, args=(uo.PerReplica([torch.ones(1, 1), torch.ones(1, 1)]),))

    assert model.weight.item() == -2


def test_noise_that_is_added_once(mirrored: Make) -> None:
    def result(num_replicas: int) -> list[Tensor]:
        strategy = mirrored(num_replicas)
        with strategy.scope():
            made = Program()

        def add_noise() -> None:
            for i, p in enumerate(made.model.parameters()):
                assert p.grad is not None
                p.grad.add_(torch.full_like(p, i))

        def step(x: Tensor, y: Tensor) -> None:
            parameters = list(made.model.parameters())
            grads = torch.autograd.grad(loss(made.model, x, y), parameters)
            for p, g in zip(parameters, grads, strict=True):
                p.grad = g
            uo.once(add_noise)
            made.optimizer.step()

        for _ in range(2):
            strategy.run(step, args=split(num_replicas))
        return made.result()

    same(result(2), result(1))
    same(result(3), result(1))


def test_a_step_after_the_run_uses_gradients_that_were_assigned(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    nn.init.zeros_(model.weight)

    def step(x: Tensor) -> None:
        model.weight.grad = x

    strategy.run(step, args=(uo.PerReplica([torch.ones(1, 1), torch.full((1, 1), 5.0)]),))
    optimizer.step()

    assert model.weight.item() == -3


def test_a_hook_that_clears_or_replaces_the_gradient(mirrored: Make, memories: str) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = nn.Linear(1, 1)

    def replace(p: Tensor) -> None:
        p.grad = torch.full_like(p, 7.0)

    def clear(p: Tensor) -> None:
        p.grad = None

    model.weight.register_post_accumulate_grad_hook(replace)
    model.bias.register_post_accumulate_grad_hook(clear)

    def step(x: Tensor) -> Any:
        model(x).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad.item(), model.bias.grad is None

    found = strategy.run(step, args=(uo.PerReplica([torch.ones(1, 1), torch.zeros(1, 1)]),))

    assert set(strategy.experimental_local_results(found)) == {(7.0, True)}


def test_gradients_that_a_step_has_cleared_are_cleared_outside(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    strategy.run(lambda: model(torch.ones(1)).backward())
    before = model.weight.item()

    strategy.run(model.zero_grad)
    assert model.weight.grad is None
    optimizer.step()
    assert model.weight.item() == before


def test_a_post_accumulate_hook_that_is_made_in_a_step_is_refused(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = net()

    def step() -> None:
        model[0].weight.register_post_accumulate_grad_hook(print)  # type: ignore[index]

    with pytest.raises(ContextError, match="outside `run`"):
        strategy.run(step)
