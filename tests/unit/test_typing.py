"""What type checkers know of a program: mypy checks this file with the others."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import unisono as uo


class Trainer:
    @uo.function
    def step(self, x: Tensor) -> Tensor:
        return x + 1


@uo.function(strict=True)
def step(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * scale


def doubled(number: int) -> int:
    return 2 * number


def test_functions_and_methods_keep_their_signature() -> None:
    x = torch.ones(())

    with uo.MirroredStrategy(["cpu:0"]).scope():
        assert assert_type(uo.once(doubled, 1), int) == 2
        assert_type(Trainer().step(x), Tensor)
        assert_type(step(x, scale=2.0), Tensor)


def test_a_step_may_use_its_context_without_asking_for_none() -> None:
    strategy = uo.MirroredStrategy(["cpu:0", "cpu:1"])

    found = strategy.run(lambda: uo.get_replica_context().replica_id_in_sync_group)
    strategy.close()

    assert found.values == (0, 1)


def test_what_is_mirrored_keeps_its_class() -> None:
    strategy = uo.MirroredStrategy(["cpu:0"])

    assert_type(strategy.mirror(nn.Linear(1, 1)), nn.Linear)
