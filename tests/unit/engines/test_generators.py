"""Seeds and generators inside a step."""

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, manual_seed
from torch.nn import functional

import unisono as uo
from unisono.errors import ContextError

Make = Callable[..., uo.MirroredStrategy]


def results(strategy: uo.Strategy, step: Callable[[], object]) -> tuple[Any, ...]:
    return strategy.experimental_local_results(strategy.run(step))


SEEDS: dict[str, Callable[[int], object]] = {
    "torch.manual_seed": lambda seed: torch.manual_seed(seed),
    "torch.random.manual_seed": lambda seed: torch.random.manual_seed(seed),
    "imported by name": manual_seed,
}


@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
def test_a_seed_set_in_a_step_is_that_of_the_replica(
    mirrored: Make, seed: Callable[[int], object]
) -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(7)).tolist()
    torch.manual_seed(1)
    strategy = mirrored(3)
    strategy.run(lambda: None)
    before = torch.get_rng_state()

    def step() -> tuple[Any, ...]:
        seed(7)
        first = torch.rand(3).tolist()
        dropped = functional.dropout(torch.ones(9)).tolist()
        seed(7)
        return (*first, *torch.rand(3).tolist(), *dropped, torch.initial_seed())

    found = results(strategy, step)

    assert [list(one[:6]) for one in found] == [expected * 2] * 3
    assert found[0] == found[1] == found[2]
    assert found[0][-1] == 7
    # As after any other step.
    torch.set_rng_state(before)
    strategy.run(lambda: None)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    strategy.run(step)
    assert torch.equal(torch.get_rng_state(), after)


def test_each_replica_can_have_its_own_seed(mirrored: Make) -> None:
    def step() -> list[float]:
        context = uo.get_replica_context()
        assert context is not None
        torch.manual_seed(context.replica_id_in_sync_group)
        return torch.rand(2).tolist()

    expected = [
        torch.rand(2, generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(2)
    ]

    assert list(results(mirrored(), step)) == expected


def test_torch_seed_gives_each_replica_other_numbers(mirrored: Make) -> None:
    assert len({*results(mirrored(3), torch.seed)}) == 3


def test_a_fork_of_the_generators_is_undone_on_each_replica(mirrored: Make) -> None:
    def step() -> bool:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            inside = torch.rand(4)
            expected = torch.rand(4, generator=torch.Generator().manual_seed(3))
        return torch.equal(inside, expected)

    def forked() -> float:
        step()
        return torch.rand(1).item()

    strategy = mirrored()
    torch.manual_seed(1)
    plain = results(strategy, lambda: torch.rand(1).item())
    torch.manual_seed(1)

    assert results(strategy, forked) == plain
    assert strategy.run(step) is True


def test_a_generator_made_outside_draws_the_same_on_every_replica(mirrored: Make) -> None:
    given, twin = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)
    strategy = mirrored(3)

    def step() -> tuple[float, ...]:
        time.sleep(random.Random().random() / 100)
        drawn = torch.rand(2, generator=given), torch.randperm(5, generator=given)
        torch.nn.init.normal_(torch.empty(2), 0.0, 1.0, given)
        return (*drawn[0].tolist(), *drawn[1].tolist())

    for _ in range(3):
        expected = (
            *torch.rand(2, generator=twin).tolist(),
            *torch.randperm(5, generator=twin).tolist(),
        )
        torch.nn.init.normal_(torch.empty(2), 0.0, 1.0, twin)
        found = results(strategy, step)
        assert found == (expected,) * 3
        assert torch.equal(given.get_state(), twin.get_state())


def test_after_a_run_a_generator_goes_on_as_that_of_replica_0(mirrored: Make) -> None:
    given, twin = torch.Generator().manual_seed(4), torch.Generator().manual_seed(4)

    def step() -> None:
        context = uo.get_replica_context()
        assert context is not None
        for _ in range(1 + context.local_id):
            torch.rand(1, generator=given)

    mirrored(3).run(step)
    torch.rand(1, generator=twin)

    assert torch.equal(given.get_state(), twin.get_state())


def test_a_generator_made_in_a_step_is_the_replicas_own(mirrored: Make) -> None:
    def step() -> bool:
        own = torch.Generator().manual_seed(4)
        first = torch.rand(3, generator=own)
        own.manual_seed(4)
        return torch.equal(first, torch.rand(3, generator=own))

    assert mirrored(3).run(step) is True


def test_a_generator_made_outside_cannot_be_seeded_in_a_step(mirrored: Make) -> None:
    given = torch.Generator()
    meet = threading.Barrier(2)

    def step() -> None:
        torch.rand(1, generator=given)
        meet.wait(30)
        given.manual_seed(3)
        torch.rand(1, generator=given)

    with pytest.raises(ContextError, match=r"call `torch\.manual_seed\(\)` in the step"):
        mirrored().run(step)


def test_the_default_generator_by_name_is_the_replicas_own(mirrored: Make) -> None:
    strategy = mirrored()

    def drawn(draw: Callable[[], Tensor]) -> tuple[Any, ...]:
        torch.manual_seed(8)
        return results(strategy, lambda: draw().tolist())

    assert drawn(lambda: torch.rand(3, generator=torch.default_generator)) == drawn(
        lambda: torch.rand(3)
    )


@pytest.mark.parametrize(
    ("draw", "name"), [(random.random, "Python's `random`"), (np.random.rand, "`numpy.random`")]
)
def test_a_step_that_draws_from_a_generator_of_all_threads_is_told_once(
    mirrored: Make, draw: Callable[[], float], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = mirrored()

    with caplog.at_level(logging.WARNING, "unisono"):
        for _ in range(5):
            strategy.run(draw)

    (line,) = caplog.messages
    assert f"A step has drawn from {name}, which all replicas share" in line
    assert "random.Random(seed + replica_id)" in line
