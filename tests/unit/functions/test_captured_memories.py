"""Captured steps on several memories: graphs and a stream for each, and exchanges between them."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import unisono as uo
from unit.functions.program_parts import KINDS, Plain, recordings, replicas
from unit.functions.programs import PROGRAMS, buffers_in_between, check_same_bits, outcome

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*use of fork"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("kind", KINDS)
def test_captured_steps_have_the_bits_of_eager_ones(
    kind: str, name: str, num_replicas: int
) -> None:
    check_same_bits(name, kind, num_replicas, are_separate=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("are_separate", [False, True])
def test_buffers_that_replicas_replace_are_combined_in_every_replay(
    kind: str, are_separate: bool
) -> None:
    program = functools.partial(buffers_in_between, replaces=True)
    outcomes = []
    for mark in (lambda step: step, uo.function(strict=True)):
        with replicas(kind, 2, are_separate=are_separate) as strategy:
            outcomes.append(outcome(program, strategy, mark))
    assert all(map(torch.equal, *outcomes))


@pytest.mark.gpu
def test_each_memory_has_its_own_graphs_and_stream() -> None:
    with replicas("cuda", 3, are_separate=True) as strategy:
        program = Plain(lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9))
        outcome(program, strategy, uo.function(strict=True))
        (recording,) = recordings(strategy)
        lanes = strategy.extended._captures.lanes
        assert len({lane.stream for lane in lanes.all}) == 3
        # The forward and backward pass, then Python reduces, updates, and combines the statistics.
        assert len(recording._parts[0].graphs) == 3
        assert recording.num_calls == 3


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_outside_reaches_all_memories(kind: str) -> None:
    with replicas(kind, 2, are_separate=True) as strategy:
        with strategy.scope():
            model = nn.Linear(3, 1, bias=False)

        @uo.function(strict=True)
        def step(x: Tensor) -> Tensor:
            with torch.no_grad():
                total: Tensor = model(x).sum()
                return total

        x = uo.PerReplica([torch.ones(2, 3, device=kind)] * 2)
        for i in range(6):
            with torch.no_grad():
                model.weight.fill_(i)
            assert [one.item() for one in strategy.run(step, args=(x,)).values] == [6.0 * i] * 2


@pytest.mark.gpu
def test_sparse_gradients_of_several_gpus_stay_eager(caplog: pytest.LogCaptureFixture) -> None:
    with replicas("cuda", 2, are_separate=True) as strategy:
        with strategy.scope():
            table = nn.Embedding(5, 2, sparse=True)

        @uo.function
        def step(numbers: Tensor) -> None:
            table.zero_grad()
            table(numbers).sum().backward()

        numbers = uo.PerReplica([torch.tensor([1, 2], device="cuda")] * 2)
        for _ in range(4):
            strategy.run(step, args=(numbers,))
        assert recordings(strategy) == []
    assert "sparse" in caplog.text
