"""Random programs train on replicas as on one device.

`UNISONO_PROGRAMS` sets how many there are, and `UNISONO_PROGRAM_SEED` the seed of the first.
"""

from __future__ import annotations

import os
from contextlib import nullcontext

import pytest
import torch

import unisono as uo
from programs.random_programs import RandomProgram, Training, replicas_agree
from unisono.testing import separate_memories

NUM_PROGRAMS = int(os.environ.get("UNISONO_PROGRAMS", "50"))
FIRST_SEED = int(os.environ.get("UNISONO_PROGRAM_SEED", "0"))

pytestmark = [
    pytest.mark.timeout(300 + 5 * NUM_PROGRAMS),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]


def difference(program: RandomProgram) -> str | None:
    """Returns what differs between one device and replicas, in words."""
    expected = Training(program, None).train()
    with separate_memories() if program.has_memories else nullcontext():
        strategy = uo.MirroredStrategy([f"cpu:{i}" for i in range(program.num_replicas)])
        try:
            training = Training(program, strategy)
            found = training.train()
            if not replicas_agree(training, strategy):
                return "replicas see different weights"
        finally:
            strategy.close()
    differing = [
        name
        for name, value in expected.items()
        # Only the order of sums is another.
        if not torch.allclose(value.double(), found[name].double(), rtol=2e-3, atol=2e-4)
    ]
    return f"other values of {differing}" if differing else None


def test_replicas_train_as_one_device() -> None:
    failures = []
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_PROGRAMS):
        program = RandomProgram.drawn(seed)
        if (what := difference(program)) is not None:
            failures.append(f"{program}: {what}")
    assert not failures, "\n".join(failures)
