"""Hooks that a step registers or removes act on its replica, as on one device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle

import unisono as uo
from unisono.errors import ContextError
from unisono.modules import torch_calls
from unisono.modules.attributes import raw
from unit.gradients.test_own_gradients import trained
from unit.modules.test_once_calls import Program, X, Y, loss, same, split

Make = Callable[..., uo.MirroredStrategy]


def double(module: Any, args: Any, out: Tensor) -> Tensor:
    return 2 * out


class Features(Program):
    """Hooks look at features, and change them, in every step."""

    def step(self, x: Tensor, y: Tensor) -> None:
        seen: list[Tensor] = []
        first, second = self.model[0], self.model[1]  # type: ignore[index]
        keep = first.register_forward_hook(lambda *given: seen.append(given[2]))
        with second.register_forward_pre_hook(lambda _, args: (args[0] * 1.5,)):
            out = self.model(x)
        keep.remove()
        (features,) = seen
        assert len(features) == len(x)
        self.optimizer.zero_grad()
        ((out - y).square().mean() + features.square().mean()).backward()
        self.optimizer.step()


class MoreEveryTime(Program):
    """Hooks stay: every step adds one to a layer, and one to a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.model[0]  # type: ignore[index]
        self.first.weight.register_hook(lambda grad: grad * 0.9)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.first.register_forward_hook(lambda _, args, out: out * 1.1)
        last = self.model[2]  # type: ignore[index]
        last.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 1.2,))
        self.first.weight.register_hook(lambda grad: grad * 1.3)
        self.backward(x, y)
        self.optimizer.step()


class OnceOnly(Program):
    """Hooks from outside remove themselves when they are called first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.model[0]  # type: ignore[index]
        self.of_module: RemovableHandle = self.first.register_forward_hook(self.on_module)
        self.of_tensor: RemovableHandle = self.first.weight.register_hook(self.on_tensor)

    def on_module(self, module: Any, args: Any, out: Tensor) -> Tensor:
        self.of_module.remove()
        return 3 * out

    def on_tensor(self, grad: Tensor) -> Tensor:
        self.of_tensor.remove()
        return 3 * grad

    def step(self, x: Tensor, y: Tensor) -> None:
        self.backward(x, y)
        loss(self.model, x, y).backward()
        self.optimizer.step()

    def result(self) -> list[Tensor]:
        assert not self.first._forward_hooks
        assert not self.first.weight._backward_hooks
        return super().result()


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("program", [Features, MoreEveryTime, OnceOnly])
def test_replicas_end_with_the_weights_of_one_device(
    mirrored: Make, memories: str, program: type[Program], num_replicas: int
) -> None:
    expected = trained(mirrored(1), program, (X, Y))

    same(trained(mirrored(num_replicas), program, split(num_replicas)), expected)


def test_hooks_from_outside_come_and_go_beside_those_of_replicas(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = torch.nn.Identity()

    def step(x: Tensor, *, adds: bool) -> Tensor:
        if adds:
            model.register_forward_hook(double)
        found: Tensor = model(x)
        return found

    def values(*, adds: bool) -> list[float]:
        parts = strategy.run(step, args=(torch.ones(()),), kwargs={"adds": adds})
        return [part.item() for part in strategy.experimental_local_results(parts)]

    assert values(adds=True) == [2.0, 2.0]
    outside = model.register_forward_hook(double)
    assert values(adds=False) == [4.0, 4.0]
    outside.remove()
    assert values(adds=True) == [4.0, 4.0]
    assert model(torch.ones(())).item() == 1.0


def test_a_replica_without_samples_keeps_no_hook(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = torch.nn.Identity()

    def step(x: Tensor) -> Tensor:
        model.register_forward_hook(double)
        found: Tensor = model(x)
        return found

    def values(size: int) -> list[float]:
        (batch,) = strategy.experimental_distribute_dataset([torch.ones(size)])
        parts = strategy.run(step, args=(batch,))
        return [part[0].item() for part in strategy.experimental_local_results(parts)]

    assert values(1) == [2.0]
    model.register_forward_hook(double)
    assert values(2) == [8.0, 4.0]
    assert model(torch.ones(())).item() == 2.0


def test_a_hook_of_several_parameters_is_registered_in_the_step(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        made = Program()
    message = r"register_multi_grad_hook.*`0.weight` of Sequential.*in the step"

    def step(x: Tensor, y: Tensor) -> Tensor:
        seen: list[Any] = []
        handle = register_multi_grad_hook(list(made.model.parameters()), seen.append)
        made.backward(x, y)
        handle.remove()
        (grads,) = seen
        return torch.tensor(len(grads))

    assert [part.item() for part in strategy.run(step, args=split(2)).values] == [4, 4]
    outside = register_multi_grad_hook(list(made.model.parameters()), lambda _: None)
    with pytest.raises(ContextError, match=message):
        strategy.run(made.backward, args=split(2))
    outside.remove()
    strategy.run(made.backward, args=split(2))


def test_replicas_that_register_their_first_hooks_at_the_same_time_have_their_own(
    mirrored: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = nn.Linear(1, 1)
    looks, has_registered = threading.Event(), threading.Event()

    def slow(module: nn.Module) -> dict[str, Any]:
        if local_id() == 0 and not looks.is_set():
            looks.set()
            has_registered.wait(30)
        return raw(module)

    monkeypatch.setattr(torch_calls, "raw", slow)

    def step() -> int:
        if local_id() == 1:
            assert looks.wait(30)
        handle = model.register_forward_hook(lambda *_: None)
        has_registered.set()
        uo.once(lambda: None)
        found = len(model._forward_hooks)
        uo.once(lambda: None)
        handle.remove()
        return found

    assert strategy.experimental_local_results(strategy.run(step)) == (1,)
    assert not raw(model)["_forward_hooks"]


def local_id() -> int:
    context = uo.get_replica_context()
    assert context is not None
    return context.local_id
