"""Random programs train on replicas as on one device.

`UNISONO_PROGRAMS` sets how many there are, and `UNISONO_PROGRAM_SEED` the seed of the first.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from unit.functions.program_parts import recordings

import unisono as uo
from programs.random_features import FeatureProgram, FeatureTraining
from programs.random_programs import RandomProgram, Training, replicas_agree
from programs.running import default_dtype
from unisono.testing import separate_memories

NUM_PROGRAMS = int(os.environ.get("UNISONO_PROGRAMS", "50"))
FIRST_SEED = int(os.environ.get("UNISONO_PROGRAM_SEED", "0"))
SEEDS = range(FIRST_SEED, FIRST_SEED + NUM_PROGRAMS)
# Captures take longest, and parts can run at the same time.
NUM_PARTS = 5

pytestmark = [
    pytest.mark.timeout(300 + 5 * NUM_PROGRAMS),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    # torch scripts derivatives when they are asked for first.
    pytest.mark.filterwarnings("ignore:.torch.jit.script"),
]


def difference(program: Any, make: Any, tolerance: float, **settings: Any) -> str | None:
    """Returns what differs between one device and replicas, in words."""
    expected: dict[str, Tensor] = make(program, None).train()
    with separate_memories() if program.has_memories else nullcontext():
        devices = [f"cpu:{i}" for i in range(program.num_replicas)]
        strategy = uo.MirroredStrategy(devices, **settings)
        try:
            training = make(program, strategy)
            found: dict[str, Tensor] = training.train()
            if not replicas_agree(training.model, strategy):
                return "replicas see different weights"
        finally:
            strategy.close()
    differing = [
        name
        for name, value in expected.items()
        # Only the order of sums is another.
        if not torch.allclose(value, found[name], rtol=10 * tolerance, atol=tolerance)
    ]
    return f"other values of {differing}" if differing else None


def test_replicas_train_as_one_device() -> None:
    failures = []
    for seed in SEEDS:
        # Sums in another order round to other numbers in bfloat16.
        program = replace(RandomProgram.drawn(seed), autocast="none")
        if (what := difference(program, Training, 2e-4)) is not None:
            failures.append(f"{program}: {what}")
    assert not failures, "\n".join(failures)


def test_features_of_torch_do_on_replicas_as_on_one_device() -> None:
    failures = []
    for seed in SEEDS:
        program = FeatureProgram.drawn(seed)
        with default_dtype(torch.float64):
            what = difference(program, FeatureTraining, 1e-8, **program.settings)
        if what is not None:
            failures.append(f"{program}: {what}")
    assert not failures, "\n".join(failures)


class InPhases(Training):
    """Takes more steps, with few different numbers, so that steps are captured and replayed."""

    num_epochs = 5

    def _run(self, batch: tuple[Tensor, ...], number: int) -> list[Tensor]:
        return super()._run(batch, number % self._program.num_accumulated)


class FeaturesInPhases(FeatureTraining):
    """The same for programs with features."""

    num_epochs = 4

    def _run(self, step: Any, number: int, x: Tensor, y: Tensor) -> list[float]:
        return super()._run(step, min(number, 3), x, y)

    def _between(self) -> list[float]:
        # The optimizer would keep parameters of a model that is no more.
        is_done = self._program.between == "new group" and hasattr(self, "more")
        return [] if is_done else super()._between()


def outcome(program: Any, make: Any, mark: Any, **settings: Any) -> tuple[Any, int]:
    """Returns what a program has learned, and how many steps were captured."""
    with separate_memories() if program.has_memories else nullcontext():
        devices = [f"cpu:{i}" for i in range(program.num_replicas)]
        strategy: Any = uo.MirroredStrategy(devices, **settings)
        run = strategy.run
        strategy.run = lambda fn, **given: run(mark(fn), **given)
        try:
            found = make(program, strategy).train()
            number = len(recordings(strategy))
        finally:
            strategy.close()
        return found, number


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_captured_steps_train_as_eager_ones(part: int) -> None:
    failures, num_captured = [], 0
    seeds = SEEDS[part::NUM_PARTS]
    for seed in seeds:
        first, second = RandomProgram.drawn(seed), FeatureProgram.drawn(seed)
        kinds: list[Any] = [(first, InPhases, torch.float32, {})]
        kinds.append((second, FeaturesInPhases, torch.float64, second.settings))
        for program, make, dtype, settings in kinds:
            with default_dtype(dtype):
                eager, _ = outcome(program, make, lambda fn: getattr(fn, "fn", fn), **settings)
                captured, number = outcome(program, make, uo.function, **settings)
                alone = replace(program, num_replicas=1, has_memories=False)
                plain = make(alone, None).train()
                captured_alone, _ = outcome(alone, make, uo.function, **settings)
            num_captured += number > 0
            pairs = [(eager, captured), (plain, captured_alone)]
            wrong = [
                name
                for one, other in pairs
                for name in one
                if not torch.equal(one[name], other[name])
            ]
            if wrong:
                failures.append(f"{program}: other values of {wrong}")
    assert not failures, "\n".join(failures)
    assert num_captured > len(seeds) / 2
