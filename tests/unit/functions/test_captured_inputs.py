"""Arguments and results of captured steps: what a replay does with them, and what it cannot do."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import unisono as uo
from unisono.errors import CaptureError
from unit.functions.program_parts import recordings, replicas
from unit.functions.programs import tensors_in


def writing(x: Tensor) -> Any:
    return x.mul_(2)


def writing_past_autograd(x: Tensor) -> Any:
    x.data.mul_(2)
    return x + 1


def reading_the_clock(x: Tensor) -> Any:
    return x * (2 if time.time() > 0 else 1)


def making_a_tensor_of_numbers(x: Tensor) -> Any:
    _numbers.append(_numbers.pop() + 1)
    return x * torch.tensor(float(_numbers[0]))


_numbers = [1]


def making_a_tensor_of_tensors(x: Tensor) -> Any:
    return x * torch.tensor([x[0], 2.0])


def seeding(x: Tensor) -> Any:
    torch.manual_seed(7)
    return x * 2


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (writing, "writes to an argument"),
        (writing_past_autograd, "writes to an argument"),
        (reading_the_clock, "reads the clock"),
        (making_a_tensor_of_numbers, "changes `_numbers`"),
        (making_a_tensor_of_tensors, "reads the values of a tensor"),
        (seeding, "seeds a random generator"),
    ],
)
def test_what_a_replay_would_leave_out_on_cpus_is_refused(
    body: Any, reason: str, num_replicas: int
) -> None:
    with replicas("cpu", num_replicas) as strategy:
        parts = [torch.ones(2) for _ in range(num_replicas)]
        with pytest.raises(CaptureError, match=reason):
            for _ in range(4):
                strategy.run(uo.function(body, strict=True), args=(uo.PerReplica(parts),))


def test_numbers_in_a_new_tensor_count(caplog: pytest.LogCaptureFixture) -> None:
    state = np.zeros(1)
    with replicas("cpu", 1) as strategy:

        @uo.function
        def step(x: Tensor) -> Tensor:
            state[0] += 1
            return x * torch.tensor(float(state[0]))

        found = [strategy.run(step, args=(torch.ones(1),)).item() for _ in range(6)]
    assert found == [1, 2, 3, 4, 5, 6]
    assert "does not do the same every time" in caplog.text


def test_an_argument_that_requires_a_gradient_stays_eager() -> None:
    with replicas("cpu", 1) as strategy:
        step = uo.function(lambda x: x.square().sum().backward())
        for i in range(6):
            x = torch.full((2,), float(i), requires_grad=True)
            strategy.run(step, args=(x,))
            assert x.grad is not None
            assert x.grad.tolist() == [2.0 * i] * 2


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_layout_of_arguments_is_that_of_the_call(num_replicas: int) -> None:
    def strides(x: Tensor) -> Any:
        return torch.tensor(x.stride()), x @ x.t()

    layouts = [
        lambda x: x[::2, 1:5],
        lambda x: x[:1].expand(5, -1),
        lambda x: x.t(),
        lambda x: x[3:3],
        lambda x: x.flatten()[7:19].view(3, 4),
    ]
    with replicas("cpu", num_replicas) as strategy:
        for layout in layouts:
            step = uo.function(strides, strict=True)
            for i in range(5):
                made = torch.Generator().manual_seed(i)
                parts = [
                    layout(torch.randn(10, 8, generator=made))  # type: ignore[no-untyped-call]
                    for _ in range(num_replicas)
                ]
                found = strategy.run(step, args=(uo.PerReplica(parts),))
                wanted = strategy.run(step.fn, args=(uo.PerReplica(parts),))
                for one, other in zip(tensors_in(found), tensors_in(wanted), strict=True):
                    assert torch.equal(one, other)


def test_one_tensor_in_two_places_is_one_tensor() -> None:
    with replicas("cpu", 1) as strategy:

        @uo.function(strict=True)
        def step(x: Tensor, y: Tensor) -> Any:
            return (x + y) * (2 if x is y else 1)

        for i in range(10):
            x, y = torch.full((2,), float(i)), torch.full((2,), 1.0)
            assert strategy.run(step, args=(x, x)).tolist() == [4.0 * i] * 2
            assert strategy.run(step, args=(x, y)).tolist() == [1.0 + i] * 2


def test_results_have_no_history_and_say_so() -> None:
    with replicas("cpu", 1) as strategy:
        with strategy.scope():
            model = nn.Linear(2, 1)
        step = uo.function(lambda x: model(x).sum(), strict=True)
        for _ in range(5):
            found = strategy.run(step, args=(torch.ones(1, 2),))
            assert found.requires_grad
        with pytest.raises(CaptureError, match="does not note"):
            found.backward()


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_replay_that_fails_and_runs_eagerly_draws_the_same_numbers(num_replicas: int) -> None:
    def states(mark: Any) -> list[Tensor]:
        torch.manual_seed(0)
        found = []
        with replicas("cpu", num_replicas) as strategy:

            def step(words: Tensor) -> Any:
                drawn = torch.rand(5)
                return functional.embedding(words, torch.ones(5, 1)) + drawn[0]

            marked = mark(step)
            for last in (1, 1, 1, 1, 9, 1):
                words = uo.PerReplica([torch.tensor([0, last])] * num_replicas)
                with suppress(IndexError):
                    found += list(tensors_in(strategy.run(marked, args=(words,))))
                found.append(torch.get_rng_state())
        return found

    assert all(map(torch.equal, states(uo.function(strict=True)), states(lambda step: step)))


def test_fast_paths_of_torch_are_taken() -> None:
    torch.manual_seed(0)
    with replicas("cpu", 1) as strategy:
        with strategy.scope():
            model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()

        @uo.function(strict=True)
        def step(x: Tensor) -> Tensor:
            with torch.no_grad():
                found: Tensor = model(x)
                return found

        for _ in range(5):
            x = torch.randn(2, 4, 8)
            assert torch.equal(strategy.run(step, args=(x,)), strategy.run(step.fn, args=(x,)))


def test_a_step_under_a_profiler_is_captured_later() -> None:
    events: list[str] = []
    with replicas("cpu", 1) as strategy:
        step = uo.function(lambda x: x + 1, strict=True)
        sys.setprofile(lambda frame, event, arg: events.append(event))
        try:
            for _ in range(4):
                strategy.run(step, args=(torch.ones(1),))
        finally:
            sys.setprofile(None)
        assert recordings(strategy) == []
        for _ in range(3):
            strategy.run(step, args=(torch.ones(1),))
        assert recordings(strategy)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_anomalies_are_detected_in_captured_steps(num_replicas: int) -> None:
    with replicas("cpu", num_replicas) as strategy:
        with strategy.scope():
            model = nn.Linear(1, 1)
        step = uo.function(lambda x: model(x).sum().sqrt().backward(), strict=True)
        x = uo.PerReplica([torch.ones(1, 1)] * num_replicas)
        with torch.no_grad():
            model.weight.fill_(1.0)
            model.bias.fill_(0.0)
        for _ in range(4):
            strategy.run(step, args=(x,))
        assert recordings(strategy)
        with torch.no_grad():
            model.weight.fill_(-1.0)
        with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="nan values"):
            strategy.run(step, args=(x,))
