"""Gradients of passes within `no_sync()`, which a later pass reduces."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as uo
from unisono.errors import ContextError
from unit.functions.program_parts import recordings

Make = Callable[..., uo.MirroredStrategy]


@pytest.mark.parametrize("op", ["MEAN", "SUM"])
def test_gradients_that_wait_are_reduced_by_the_next_pass(op: str, mirrored: Make) -> None:
    """Also those of parameters that this pass does not use."""
    strategy = mirrored(reduce_gradients=op)
    with strategy.scope():
        models = [nn.Linear(1, 1, bias=False) for _ in range(2)]

    def step(x: Tensor) -> list[float]:
        with strategy.no_sync():
            (models[0](x) + models[1](x)).sum().backward()
        models[0](x).sum().backward()
        grads = [model.weight.grad for model in models]
        return [grad.item() for grad in grads if grad is not None]

    inputs = uo.PerReplica((torch.ones(1, 1), torch.full((1, 1), 3.0)))
    for found in strategy.experimental_local_results(strategy.run(step, args=(inputs,))):
        assert found == ([4.0, 2.0] if op == "MEAN" else [8.0, 4.0])


def test_a_post_accumulate_hook_needs_a_reduced_gradient(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(1, 1)
    model.weight.register_post_accumulate_grad_hook(lambda p: None)

    def step() -> None:
        with strategy.no_sync():
            model(torch.ones(1)).backward()

    with pytest.raises(ContextError, match=r"`weight`.*no_sync\(\)` no gradient is reduced"):
        strategy.run(step)
    strategy.run(lambda: model(torch.ones(1)).backward())


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("what", ["optimizer", "model"])
def test_gradients_accumulate_without_reduction_in_every_round(
    what: str, set_to_none: bool, mirrored: Make, memories: str
) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    target: Any = optimizer if what == "optimizer" else model
    inputs = uo.PerReplica((torch.ones(1, 1), torch.full((1, 1), 3.0)))

    def step(x: Tensor, number: int) -> Tensor:
        if number == 0:
            target.zero_grad(set_to_none=set_to_none)
        with strategy.no_sync() if number < 2 else nullcontext():
            model(x).sum().backward()
        if number == 2:
            optimizer.step()
        assert model.weight.grad is not None
        return model.weight.grad.clone()

    for _ in range(3):
        for number, expected in enumerate([(1, 3), (2, 6), (6, 6)]):
            found = strategy.run(step, args=(inputs, number))
            assert tuple(one.item() for one in found.values) == expected
    assert model.weight.grad is not None
    assert model.weight.grad.item() == 6


class Waiting:
    """A model whose gradients wait on the replicas, after another step has updated it."""

    def __init__(self, strategy: uo.MirroredStrategy, *, is_captured: bool, uses_all: bool) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.model = nn.Linear(1, 1, bias=False)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        nn.init.zeros_(self.model.weight)
        self._uses_all = uses_all
        mark: Any = uo.function if is_captured else lambda fn: fn
        self._steps = mark(self._update), mark(self._add)
        for _ in range(5):
            self.update()
            self.wait()
            self.model.weight.grad = None
        assert self.model.weight.item() == -10
        assert len(recordings(strategy)) == (2 if is_captured else 0)

    def update(self) -> None:
        self.strategy.run(self._steps[0], args=(uo.PerReplica((torch.ones(1), torch.ones(1) * 3)),))

    def wait(self) -> None:
        self.strategy.run(self._steps[1], args=(uo.PerReplica((torch.ones(1), torch.ones(1) * 7)),))

    def _update(self, x: Tensor) -> None:
        self.model(x).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _add(self, x: Tensor) -> None:
        with self.strategy.no_sync():
            if self._uses_all or (x > 3).all():
                self.scaler.scale(self.model(x).sum()).backward()

    def clear_by_hand(self) -> None:
        self.model.weight.grad = None

    def clear_by_optimizer(self) -> None:
        self.optimizer.zero_grad()

    def clear_in_place(self) -> None:
        self.model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("way", ["by_hand", "by_optimizer", "in_place"])
def test_gradients_that_wait_can_be_cleared_between_runs(
    way: str, is_captured: bool, mirrored: Make, memories: str
) -> None:
    made = Waiting(mirrored(), is_captured=is_captured, uses_all=True)

    made.wait()
    getattr(made, f"clear_{way}")()
    made.update()

    assert made.model.weight.item() == -12


def test_a_gradient_that_the_first_replica_does_not_have_can_be_cleared(mirrored: Make) -> None:
    made = Waiting(mirrored(), is_captured=False, uses_all=False)

    made.wait()
    made.clear_by_hand()
    made.update()
    made.wait()
    made.clear_by_hand()
    made.optimizer.step()

    assert made.model.weight.item() == -12


def test_gradients_that_wait_are_unscaled_and_reduced_outside(mirrored: Make) -> None:
    made = Waiting(mirrored(), is_captured=False, uses_all=True)

    made.wait()
    made.scaler.step(made.optimizer)

    assert made.model.weight.item() == -10 - 4


@pytest.mark.parametrize("is_captured", [False, True])
def test_gradients_that_wait_are_not_written_outside(is_captured: bool, mirrored: Make) -> None:
    made = Waiting(mirrored(), is_captured=is_captured, uses_all=True)

    made.wait()
    nn.utils.clip_grad_norm_(made.model.parameters(), 0.1)
    for go_on in (made.update, made.wait, made.optimizer.step):
        with pytest.raises(
            ContextError, match=r"written outside `run` before it was reduced.*once"
        ):
            go_on()
    made.clear_by_optimizer()
    made.update()

    assert made.model.weight.item() == -12


@pytest.mark.parametrize("op", ["MEAN", "SUM"])
@pytest.mark.parametrize("what", ["go on", "clear outside", "clear in the step", "update outside"])
def test_a_pass_without_reduction_adds_to_reduced_gradients(
    what: str, op: str, mirrored: Make, memories: str
) -> None:
    strategy = mirrored(reduce_gradients=op)
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    nn.init.zeros_(model.weight)
    inputs = uo.PerReplica((torch.ones(1), torch.full((1,), 3.0)))

    def add(x: Tensor, *, reduces: bool) -> None:
        with nullcontext() if reduces else strategy.no_sync():
            model(x).sum().backward()

    def step(x: Tensor) -> None:
        if what == "clear in the step":
            optimizer.zero_grad()
        add(x, reduces=True)
        optimizer.step()

    for reduces in (True, False, False):
        strategy.run(add, args=(inputs,), kwargs={"reduces": reduces})
    if what == "clear outside":
        optimizer.zero_grad()
    if what == "update outside":
        optimizer.step()
    else:
        strategy.run(step, args=(inputs,))

    num_passes = {"go on": 4, "update outside": 3}.get(what, 1)
    assert model.weight.item() == -num_passes * (2 if op == "MEAN" else 4)


# Runs on even (capital) and uneven batches: they add gradients, update, do both, or add and reduce
# before the update; "o" is an update outside. They are repeated.
HISTORIES = ("AU", "Au", "aU", "au", "Ab", "aB", "As", "aS", "ao", "aAo", "Aao", "AaU", "Aau")


@pytest.mark.parametrize("is_captured", [False, True])
def test_gradients_that_wait_keep_what_each_batch_counted_for(
    is_captured: bool, mirrored: Make
) -> None:
    found = {
        history: _trained(history, mirrored(), is_captured=is_captured) for history in HISTORIES
    }

    num_passes = {history: len(re.findall("[abs]", history.lower())) for history in HISTORIES}
    assert found == {history: pytest.approx(-5 * 4 * num_passes[history]) for history in HISTORIES}


def _trained(history: str, strategy: uo.MirroredStrategy, *, is_captured: bool) -> float:
    """Returns the weight after four rounds, in each pass of which the gradient is 5."""
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    nn.init.zeros_(model.weight)
    even = uo.PerReplica((torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0], [11.0]])))
    uneven = uo.PerReplica((torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([[11.0]])))
    mark: Any = uo.function if is_captured else lambda fn: fn

    def add(x: Tensor) -> None:
        with strategy.no_sync():
            model(x).mean().backward()

    def both(x: Tensor) -> None:
        add(x)
        optimizer.step()

    def reduced(x: Tensor) -> None:
        model(x).mean().backward()
        optimizer.step()

    steps = {"a": mark(add), "b": mark(both), "s": mark(reduced)}
    steps["u"] = mark(lambda x: optimizer.step())
    for name in 4 * history:
        if name == "o":
            optimizer.step()
        else:
            strategy.run(steps[name.lower()], args=(even if name.isupper() else uneven,))
        if name.lower() in "ubso":
            optimizer.zero_grad()
    return model.weight.item()
