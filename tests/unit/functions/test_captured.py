"""Captured steps on a real GPU: the bits of eager ones, and clear reasons where there are none."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as uo
from unisono.errors import CaptureError
from unisono.testing import virtual_gpus
from unit.functions.program_parts import Plain, batch, convnet, loss_of
from unit.functions.programs import PROGRAMS, outcome

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*use of fork"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


@contextmanager
def replicas(number: int) -> Iterator[uo.MirroredStrategy]:
    with virtual_gpus(number):
        strategy = uo.MirroredStrategy([f"cuda:{i}" for i in range(number)])
        try:
            yield strategy
        finally:
            strategy.close()


def captured(strategy: uo.MirroredStrategy) -> list[Any]:
    """Returns the recordings that a strategy has."""
    functions = strategy.extended._captures._functions.values()
    steps = [step for one in functions for step in one._steps.values()]
    return [step.recording for step in steps if step.recording is not None]


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_captured_steps_have_the_bits_of_eager_ones(name: str, num_replicas: int) -> None:
    with replicas(num_replicas) as strategy:
        wanted = outcome(PROGRAMS[name], strategy, lambda step: step)
    with replicas(num_replicas) as strategy:
        found = outcome(PROGRAMS[name], strategy, uo.function(strict=True))
        assert captured(strategy)
    assert len(found) == len(wanted)
    for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(one, other), f"result {place} of {len(wanted)}"


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_an_update_that_is_always_the_same_is_in_the_graph(num_replicas: int) -> None:
    with replicas(num_replicas) as strategy:
        program = Plain(lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9))
        outcome(program, strategy, uo.function(strict=True))
        (recording,) = captured(strategy)
        assert recording.num_calls == 0
        assert len(recording._parts) == 1


def test_a_shape_that_keeps_changing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with replicas(2) as strategy:
        with strategy.scope():
            model = nn.Linear(3, 1)

        @uo.function
        def step(x: Tensor) -> Tensor:
            total: Tensor = model(x).sum()
            return total

        for length in range(1, 20):
            part = torch.ones(length, 3, device="cuda")
            strategy.run(step, args=(uo.PerReplica([part, part]),))
        assert captured(strategy) == []
    assert "keep changing" in caplog.text
    assert len([one for one in caplog.records if one.levelno == logging.WARNING]) == 1


def reading(model: nn.Module, x: Tensor) -> Any:
    return float(model(x).detach().sum())


def branching(model: nn.Module, x: Tensor) -> Any:
    y = model(x).sum()
    return y if y > 0 else -y


def printing(model: nn.Module, x: Tensor) -> Any:
    print(model(x))


def setting(model: Any, x: Tensor) -> Any:
    model.count = getattr(model, "count", 0) + 1
    return model(x)


def drawing(model: nn.Module, x: Tensor) -> Any:
    import random

    return model(x) * random.random()


def merging(model: nn.Module, x: Tensor) -> Any:
    context = uo.get_replica_context()
    assert context is not None
    return context.merge_call(lambda strategy, value: 3, args=(x,))


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (reading, "waits for the GPU at .*float"),
        (branching, "waits for the GPU at .*if y > 0"),
        (printing, "waits for the GPU at .*print"),
        (setting, "sets Linear.count"),
        (drawing, "random numbers on the host"),
        (merging, "a value of Python"),
    ],
)
def test_what_cannot_be_captured_stays_eager(
    body: Any, reason: str, num_replicas: int, caplog: pytest.LogCaptureFixture
) -> None:
    with replicas(num_replicas) as strategy:
        with strategy.scope():
            model = nn.Linear(3, 1)
        x = uo.PerReplica([torch.ones(2, 3, device="cuda")] * num_replicas)

        def step(x: Tensor) -> Any:
            return body(model, x)

        for _ in range(5):
            strategy.run(uo.function(step), args=(x,))
        assert captured(strategy) == []
        strict = uo.function(lambda x: body(model, x), strict=True)
        strategy.run(strict, args=(x,))
        with pytest.raises(CaptureError, match=reason):
            strategy.run(strict, args=(x,))
    told = [one.getMessage() for one in caplog.records if "stays eager" in one.getMessage()]
    assert len(told) == 1
    assert re.search(reason, told[0]), told[0]


def test_a_variable_of_the_program_is_a_part_of_the_signature() -> None:
    factor = 1.0

    with replicas(2) as strategy:

        @uo.function(strict=True)
        def step(x: Tensor) -> Tensor:
            return x * factor

        x = uo.PerReplica([torch.ones(2, device="cuda")] * 2)
        for wanted in (1.0, 2.0, 1.0):
            factor = wanted
            for _ in range(5):
                assert strategy.run(step, args=(x,)).values[1].tolist() == [wanted] * 2


def test_results_are_the_callers_own() -> None:
    with replicas(2) as strategy:

        @uo.function(strict=True)
        def step(x: Tensor) -> Tensor:
            return x + 1

        kept = [
            strategy.run(
                step, args=(uo.PerReplica([torch.full((2,), float(i), device="cuda")] * 2),)
            )
            for i in range(6)
        ]
        assert [one.values[0].tolist() for one in kept] == [[i + 1.0] * 2 for i in range(6)]


def test_weights_that_move_are_seen() -> None:
    with replicas(2) as strategy:
        with strategy.scope():
            model = convnet()

        @uo.function(strict=True)
        def step(images: Tensor, labels: Tensor) -> Tensor:
            with torch.no_grad():
                return loss_of(model, images, labels)

        own = batch(strategy, 0)
        for _ in range(4):
            before = strategy.run(step, args=own)
        first = next(model.parameters())
        first.data = first.data * 2
        after = strategy.run(step, args=own)
        assert not torch.equal(before.values[0], after.values[0])


def test_memory_is_freed_with_the_strategy() -> None:
    def train() -> None:
        with replicas(2) as strategy:
            outcome(PROGRAMS["SGD"], strategy, uo.function(strict=True))

    train()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        train()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
