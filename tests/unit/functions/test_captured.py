"""Captured steps: the bits of eager ones, and clear reasons where there are none."""

from __future__ import annotations

import gc
import logging
import re
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import unisono as uo
from unisono.errors import CaptureError
from unit.functions.program_parts import (
    KINDS,
    Plain,
    batch,
    convnet,
    loss_of,
    recordings,
    replicas,
)
from unit.functions.programs import PROGRAMS, check_same_bits, outcome

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_have_the_bits_of_eager_ones(
    kind: str, name: str, num_replicas: int
) -> None:
    check_same_bits(name, kind, num_replicas)


def test_what_is_called_when_python_looks_for_garbage_is_no_part_of_a_step() -> None:
    called = 0

    def tell(phase: str, info: dict[str, Any]) -> None:
        nonlocal called
        called += 1
        time.perf_counter()

    threshold = gc.get_threshold()
    gc.callbacks.append(tell)
    # Zeros, or Python without the lock waits for more objects.
    gc.set_threshold(1, 0, 0)
    try:
        check_same_bits("averages", "cpu", 2)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(tell)
    assert called > 0


@pytest.mark.gpu
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_an_update_that_is_always_the_same_is_in_the_graph(num_replicas: int) -> None:
    with replicas("cuda", num_replicas) as strategy:
        program = Plain(lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9))
        outcome(program, strategy, uo.function(strict=True))
        (recording,) = recordings(strategy)
        assert recording.num_calls == 0
        assert len(recording._parts) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_shape_that_keeps_changing_is_told(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    with replicas(kind, 2) as strategy:
        with strategy.scope():
            model = nn.Linear(3, 1)

        @uo.function
        def step(x: Tensor) -> Tensor:
            total: Tensor = model(x).sum()
            return total

        for length in range(1, 20):
            part = torch.ones(length, 3, device=kind)
            strategy.run(step, args=(uo.PerReplica([part, part]),))
        assert recordings(strategy) == []
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (reading, "(waits for the GPU|values of a tensor) at .*float"),
        (branching, "(waits for the GPU|values of a tensor) at .*if y > 0"),
        (printing, "(waits for the GPU|values of a tensor) at .*print"),
        (setting, "sets Linear.count"),
        (drawing, "random numbers on the host"),
        (merging, "a value of Python"),
    ],
)
def test_what_cannot_be_captured_stays_eager(
    body: Any, reason: str, num_replicas: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with replicas(kind, num_replicas) as strategy:
        with strategy.scope():
            model = nn.Linear(3, 1)
        x = uo.PerReplica([torch.ones(2, 3, device=kind)] * num_replicas)

        def step(x: Tensor) -> Any:
            return body(model, x)

        for _ in range(5):
            strategy.run(uo.function(step), args=(x,))
        assert recordings(strategy) == []
        strict = uo.function(lambda x: body(model, x), strict=True)
        strategy.run(strict, args=(x,))
        with pytest.raises(CaptureError, match=reason):
            strategy.run(strict, args=(x,))
    told = [one.getMessage() for one in caplog.records if "stays eager" in one.getMessage()]
    assert len(told) == 1
    assert re.search(reason, told[0]), told[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_variable_of_the_program_is_a_part_of_the_signature(kind: str) -> None:
    factor = 1.0

    with replicas(kind, 2) as strategy:

        @uo.function(strict=True)
        def step(x: Tensor) -> Tensor:
            return x * factor

        x = uo.PerReplica([torch.ones(2, device=kind)] * 2)
        for wanted in (1.0, 2.0, 1.0):
            factor = wanted
            for _ in range(5):
                assert strategy.run(step, args=(x,)).values[1].tolist() == [wanted] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_middle_of_a_step_finds_the_modules_of_the_program(kind: str) -> None:
    # Python makes another object for such a number of attributes every time.
    options = SimpleNamespace(**{f"option_{i}": 2.0 for i in range(300)})
    calls: list[float] = []
    with replicas(kind, 2) as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))

        @uo.function(strict=True)
        def step(x: Tensor) -> Tensor:
            y: Tensor = model(x) * options.option_3
            uo.once(calls.append, 1.0)
            return y.detach()

        x = uo.PerReplica([torch.ones(2, 2, device=kind)] * 2)
        for is_training in (True, False, True, False):
            model.train(is_training)
            for _ in range(4):
                strategy.run(step, args=(x,))
        assert len(calls) == 16
        assert len(recordings(strategy)) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_the_callers_own(kind: str) -> None:
    with replicas(kind, 2) as strategy:

        @uo.function(strict=True)
        def step(x: Tensor) -> Tensor:
            return x + 1

        kept = [
            strategy.run(step, args=(uo.PerReplica([torch.full((2,), float(i), device=kind)] * 2),))
            for i in range(6)
        ]
        assert [one.values[0].tolist() for one in kept] == [[i + 1.0] * 2 for i in range(6)]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_move_are_seen(kind: str) -> None:
    with replicas(kind, 2) as strategy:
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


@pytest.mark.gpu
def test_memory_is_freed_with_the_strategy() -> None:
    def train() -> None:
        with replicas("cuda", 2) as strategy:
            outcome(PROGRAMS["SGD"], strategy, uo.function(strict=True))

    train()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        train()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_is_frozen_after_the_capture_stays_as_it_is(kind: str) -> None:
    with replicas(kind, 2) as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).to(kind)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @uo.function(strict=True)
        def step(x: Tensor) -> None:
            optimizer.zero_grad(set_to_none=False)
            model(x).sum().backward()
            optimizer.step()

        x = uo.PerReplica([torch.ones(2, 3, device=kind)] * 2)
        for _ in range(5):
            strategy.run(step, args=(x,))
        model[0].requires_grad_(False)
        before = [one.detach().clone() for one in model.parameters()]
        for _ in range(5):
            strategy.run(step, args=(x,))
        are_same = list(map(torch.equal, before, model.parameters()))
        assert are_same == [True, True, False, False]


def test_a_step_that_returns_a_sparse_gradient_stays_eager(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with replicas("cpu", 2) as strategy:
        with strategy.scope():
            table = nn.Embedding(5, 2, sparse=True)

        @uo.function
        def step(numbers: Tensor) -> Tensor:
            table.zero_grad()
            table(numbers).sum().backward()
            assert table.weight.grad is not None
            return table.weight.grad

        numbers = uo.PerReplica([torch.tensor([1, 2]), torch.tensor([2, 4])])
        found = [strategy.run(step, args=(numbers,)) for _ in range(4)]
        assert recordings(strategy) == []
    wanted = torch.tensor([0.0, 0.5, 1.0, 0.0, 0.5])
    assert all(torch.equal(one.values[1].to_dense()[:, 0], wanted) for one in found)
    assert "returns a sparse tensor" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_uneven_batches_are_those_of_the_call(kind: str) -> None:
    def train(strategy: uo.MirroredStrategy, mark: Any) -> Tensor:
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.Linear(3, 1).to(kind)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> None:
            (grad,) = torch.autograd.grad(model(x).square().mean(), [model.weight])
            model.weight.grad = grad
            optimizer.step()
            optimizer.zero_grad()

        marked = mark(step)
        made = torch.Generator().manual_seed(0)
        x = torch.randn(8, 3, generator=made)
        # The weights of the replicas are 1 and 1, then 4 / 3 and 2 / 3.
        for part in strategy.experimental_distribute_dataset([x[:4], x[4:7]] * 4):
            strategy.run(marked, args=(part,))
        return model.weight.detach().clone()

    with replicas(kind, 2) as strategy:
        wanted = train(strategy, lambda step: step)
    with replicas(kind, 2) as strategy:
        found = train(strategy, uo.function(strict=True))
        assert len(recordings(strategy)) == 2
    assert torch.equal(found, wanted)


def set_rate(model: nn.Module, optimizer: Any, seen: list[Any], x: Tensor) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def append(model: nn.Module, optimizer: Any, seen: list[Any], x: Tensor) -> None:
    seen.append(x.sum())


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize(
    ("body", "reason"), [(set_rate, "sets 'lr' in `param_groups` of SGD"), (append, "`seen`")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_python_that_every_replay_would_leave_out_is_refused(
    body: Any, reason: str, num_replicas: int, kind: str
) -> None:
    with replicas(kind, num_replicas) as strategy:
        with strategy.scope():
            model = nn.Linear(3, 1).to(kind)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[Any] = []

        @uo.function(strict=True)
        def step(x: Tensor) -> None:
            model(x).sum().backward()
            body(model, optimizer, seen, x)
            optimizer.step()

        x = uo.PerReplica([torch.ones(2, 3, device=kind)] * num_replicas)
        with pytest.raises(CaptureError, match=reason):
            for _ in range(4):
                strategy.run(step, args=(x,))


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_fails_while_the_step_is_captured_is_told(kind: str) -> None:
    num_calls = 0

    def count() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise RuntimeError("no room left for the log")

    with replicas(kind, 2) as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(192, momentum=None))

        @uo.function
        def step(images: Tensor, labels: Tensor) -> None:
            model(images)
            uo.once(count)

        for i in range(2):
            strategy.run(step, args=batch(strategy, i))
        with pytest.raises(RuntimeError, match="no room left for the log"):
            strategy.run(step, args=batch(strategy, 2))
        assert num_calls == 3
        for i in range(3, 6):
            strategy.run(step, args=batch(strategy, i))
        assert num_calls == 6


@pytest.mark.parametrize("has_statistics", [False, True])
def test_a_replay_that_fails_is_told_and_the_next_one_works(has_statistics: bool) -> None:
    with replicas("cpu", 2) as strategy:
        with strategy.scope():
            norm = nn.BatchNorm1d(3) if has_statistics else nn.Identity()
            model = nn.Sequential(nn.Embedding(5, 3), norm, nn.Linear(3, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @uo.function(strict=True)
        def step(words: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(words).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        def words(last: int) -> uo.PerReplica:
            return uo.PerReplica([torch.tensor([1, 2]), torch.tensor([3, last])])

        for _ in range(4):
            strategy.run(step, args=(words(4),))
        before = {name: one.clone() for name, one in model.state_dict().items()}
        # Where a replay has written nothing, an eager run says which line it is.
        with pytest.raises(RuntimeError if has_statistics else IndexError) as caught:
            strategy.run(step, args=(words(7),))
        assert "index out of range" in str(caught.value)
        if sys.version_info >= (3, 11):
            assert "Raised on replica 1 (cpu:1)." in caught.value.__notes__
        assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
        assert recordings(strategy)
        strategy.run(step, args=(words(4),))
        assert not torch.equal(model.state_dict()["2.weight"], before["2.weight"])


def test_a_step_that_calls_compiled_code_stays_eager(caplog: pytest.LogCaptureFixture) -> None:
    with replicas("cpu", 2) as strategy:
        double = torch.compile(lambda x: 2 * x, backend="eager")

        @uo.function
        def step(x: Tensor) -> Any:
            return double(x)

        for _ in range(4):
            strategy.run(step, args=(uo.PerReplica([torch.ones(2)] * 2),))
        assert recordings(strategy) == []
    assert "compiled" in caplog.text


def test_modes_of_the_caller_see_every_step() -> None:
    with replicas("cpu", 2) as strategy:
        with strategy.scope():
            model = nn.Linear(3, 3)

        @uo.function(strict=True)
        def step(x: Tensor) -> Any:
            return model(x)

        x = uo.PerReplica([torch.ones(2, 3)] * 2)
        for _ in range(4):
            strategy.run(step, args=(x,))
        with FlopCounterMode(display=False) as counter:
            strategy.run(step, args=(x,))
        assert counter.get_total_flops() == 2 * 2 * 2 * 3 * 3


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_steps_under_inference_mode_and_autocast(num_replicas: int) -> None:
    with replicas("cpu", num_replicas) as strategy:
        with strategy.scope():
            model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

        @uo.function(strict=True)
        def step(x: Tensor) -> Any:
            return model(x)

        for i in range(6):
            x = uo.PerReplica([torch.full((2, 3), float(i + j)) for j in range(num_replicas)])
            for mode in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
                model.train(mode=isinstance(mode, torch.autocast))
                before = {name: one.clone() for name, one in model.state_dict().items()}
                with mode:
                    found = strategy.run(step, args=(x,))
                after = {name: one.clone() for name, one in model.state_dict().items()}
                model.load_state_dict(before)
                with mode:
                    wanted = strategy.run(step.fn, args=(x,))
                for one, other in zip(
                    strategy.experimental_local_results(found),
                    strategy.experimental_local_results(wanted),
                    strict=True,
                ):
                    assert one.dtype is other.dtype
                    assert torch.equal(one, other)
                for name, one in model.state_dict().items():
                    assert torch.equal(one, after[name]), name
        assert len(recordings(strategy)) == 2
