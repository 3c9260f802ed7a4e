"""What a program changes between two calls of a captured step counts in the next one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.nn.utils import parametrize

import unisono as uo
from unit.functions.program_parts import Mark, recordings, replicas
from unit.functions.programs import tensors_in

factor = 1.0
options: dict[str, Any] = {"deep": {"factors": [1.0]}}


class Net(nn.Module):
    """Depends on all that a module can have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = 1.0
        self.options: dict[str, Any] = {"deep": {"factors": [1.0]}}
        self.activations = [torch.tanh]
        self.shift: Tensor
        self.register_buffer("shift", torch.full((4,), 0.1))
        self.first = nn.Linear(4, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.first(x)) * self.scale * getattr(self, "late_scale", 1.0)
        x = x * self.options["deep"]["factors"][0] + self.shift
        if "cos" in self.options:
            x = x.cos()
        for activation in self.activations:
            x = activation(x)
        if torch.are_deterministic_algorithms_enabled():
            x = x * 2
        x = self.last(x)
        return x * torch.get_default_dtype().itemsize


class Options:
    def __init__(self) -> None:
        self.factor = 1.0
        self.deep = {"factors": [1.0]}


class World:
    """A small training, and what a program may change in it."""

    def __init__(self, strategy: uo.Strategy, mark: Mark) -> None:
        self.strategy = strategy
        self.stack = ExitStack()
        with strategy.scope():
            self.model = model = Net()
            self.optimizer = optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.options = own_options = Options()

        @mark
        def step(x: Tensor) -> tuple[Tensor, Tensor]:
            loss: Tensor = (model(x) ** 2).mean() * factor * options["deep"]["factors"][0]
            loss = loss * own_options.factor * own_options.deep["factors"][0]
            if torch.is_grad_enabled():
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            return loss.detach(), loss.detach() * 1e-40

        self.step = step
        model.__dict__["early_scale"] = 3.0
        model.options["none"] = model.scale
        self.handle = model.last.register_forward_hook(lambda _, __, y: y * 0.5)

    def run(self, number: int) -> Any:
        made = torch.Generator().manual_seed(number)
        parts = [
            torch.randn(3, 4, generator=made, dtype=torch.float32)
            for _ in range(self.strategy.num_replicas_in_sync)
        ]
        return self.strategy.run(self.step, args=(uo.PerReplica(parts),))


Change = Callable[[World], Any]


def _set(name: str, value: Any) -> Change:
    return lambda world: setattr(world.model, name, value)


def _set_late(world: World) -> None:
    # The table of attributes has the same values, under another name.
    world.model.late_scale = world.model.early_scale
    del world.model.early_scale


def _rename(world: World) -> None:
    world.model.options["cos"] = world.model.options.pop("none")


def _replace_parameter(world: World) -> None:
    linear = world.model.first
    linear.weight = nn.Parameter(linear.weight.detach() * 2)
    world.optimizer.param_groups[0]["params"] = list(world.model.parameters())


def _move_parameter(world: World) -> None:
    linear = world.model.first
    linear.weight.data = linear.weight.data * 2


def _set_gradients(world: World) -> None:
    for one in world.model.parameters():
        one.grad = torch.ones_like(one)


def _write_gradients(world: World) -> None:
    for one in world.model.parameters():
        assert one.grad is not None
        one.grad.fill_(1.0)


def _clear_one_gradient(world: World) -> None:
    world.model.first.weight.grad = None


def _freeze(world: World) -> None:
    world.model.first.requires_grad_(requires_grad=False)


def _hook_forward(world: World) -> None:
    world.model.first.register_forward_hook(lambda _, __, y: y * 2)


def _doubled(_: Any, given: Any, __: Any) -> tuple[Tensor]:
    return (given[0] * 2,)


def _hook_backward(world: World) -> None:
    world.model.layers.register_full_backward_hook(_doubled)


def _hook_parameter(world: World) -> None:
    world.model.first.weight.register_hook(lambda grad: grad * 2)


def _hook_all(world: World) -> None:
    handle = global_hooks.register_module_forward_hook(
        lambda module, _, y: y * 2 if isinstance(module, nn.Linear) else y
    )
    world.stack.callback(handle.remove)


def _remove_hook(world: World) -> None:
    world.handle.remove()


def _replace_buffer(world: World) -> None:
    world.model.register_buffer("shift", torch.full((4,), 0.3))


def _write_buffer(world: World) -> None:
    world.model.shift.fill_(0.3)


def _replace_module(world: World) -> None:
    world.model.layers[2] = nn.Tanh()


def _delete_module(world: World) -> None:
    del world.model.layers[2]


def _add_module(world: World) -> None:
    world.model.layers.append(nn.Tanh())


def _parametrize(world: World) -> None:
    parametrize.register_parametrization(world.model.first, "weight", nn.Tanh())


def _set_global(_: World) -> None:
    global factor
    factor = 2.0


def _set_deep_global(_: World) -> None:
    options["deep"]["factors"][0] = 2.0


def _set_learning_rate(world: World) -> None:
    world.optimizer.param_groups[0]["lr"] = 0.5


def _add_update_hook(world: World) -> None:
    def hook(*_: Any) -> None:
        for one in world.model.parameters():
            assert one.grad is not None
            one.grad.mul_(2)

    world.optimizer.register_step_pre_hook(hook)


def _load(world: World) -> None:
    state = {name: value * 2 for name, value in world.model.state_dict().items()}
    world.model.load_state_dict(state, assign=True)
    world.optimizer.param_groups[0]["params"] = list(world.model.parameters())


def _set_dtype(world: World) -> None:
    world.stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(torch.float64)


def _be_deterministic(world: World) -> None:
    world.stack.callback(torch.use_deterministic_algorithms, mode=False)
    torch.use_deterministic_algorithms(mode=True)


def _flush(world: World) -> None:
    world.stack.callback(torch.set_flush_denormal, False)
    torch.set_flush_denormal(True)


def _enter(context: Callable[[], Any]) -> Change:
    return lambda world: world.stack.enter_context(context())


CHANGES: dict[str, Change] = {
    "attribute": _set("scale", 2.0),
    "new attribute": _set("late_scale", 2.0),
    "attribute of another name": _set_late,
    "attribute of a part": lambda world: setattr(world.model.layers[1], "momentum", 0.5),
    "deep attribute": lambda world: world.model.options["deep"]["factors"].__setitem__(0, 2.0),
    "key of another name": _rename,
    "list": lambda world: world.model.activations.append(torch.sin),
    "function": lambda world: world.model.activations.__setitem__(0, torch.sin),
    "forward": lambda world: setattr(world.model.first, "forward", torch.tanh),
    "parameter": _replace_parameter,
    "memory of a parameter": _move_parameter,
    "gradients": _set_gradients,
    "values of gradients": _write_gradients,
    "one gradient": _clear_one_gradient,
    "no gradients": lambda world: world.optimizer.zero_grad(),
    "requires_grad": _freeze,
    "forward hook": _hook_forward,
    "backward hook": _hook_backward,
    "hook of a parameter": _hook_parameter,
    "hook of all modules": _hook_all,
    "removed hook": _remove_hook,
    "buffer": _replace_buffer,
    "values of a buffer": _write_buffer,
    "module": _replace_module,
    "deleted module": _delete_module,
    "added module": _add_module,
    "parametrization": _parametrize,
    "mode": lambda world: world.model.eval(),
    "mode of a part": lambda world: world.model.layers[1].eval(),
    "global": _set_global,
    "deep global": _set_deep_global,
    "attribute of an object": lambda world: setattr(world.options, "factor", 2.0),
    "deep attribute of an object": lambda world: world.options.deep["factors"].__setitem__(0, 2.0),
    "learning rate": _set_learning_rate,
    "hook of an update": _add_update_hook,
    "loaded state": _load,
    "default dtype": _set_dtype,
    "deterministic algorithms": _be_deterministic,
    "small numbers": _flush,
    "no grad": _enter(torch.no_grad),
    "inference mode": _enter(torch.inference_mode),
    "autocast": _enter(lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False)),
}


def trained(
    number: int, mark: Mark, change: Change, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], list[Any]]:
    """Runs a training in which something changes; returns its results, and what was captured."""
    with replicas("cpu", number) as strategy, monkeypatch.context() as patch:
        patch.setitem(globals(), "factor", 1.0)
        patch.setitem(globals(), "options", {"deep": {"factors": [1.0]}})
        torch.manual_seed(0)
        world = World(strategy, mark)
        found = [world.run(i) for i in range(5)]
        captured = recordings(strategy)
        with world.stack:
            change(world)
            found += [world.run(i) for i in range(5, 10)]
        return list(tensors_in([found, dict(world.model.state_dict())])), captured


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_two_calls_counts(
    name: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, _ = trained(number, lambda step: step, CHANGES[name], monkeypatch)
    found, captured = trained(number, uo.function, CHANGES[name], monkeypatch)
    assert captured
    assert len(found) == len(wanted)
    for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(one, other), f"result {place} of {len(wanted)}"
