"""The programs of the other files on workers, which end with the weights of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_replica import replica_id
from torch import Tensor
from worker_threads import on_strategies

import unisono as uo
from unisono.errors import ContextError, ReplicaMismatchError
from unit.gradients import test_own_gradients, test_unfrozen
from unit.modules import test_groups, test_once_calls
from unit.modules.test_once_calls import Program, X, Y, loss, same

PROGRAMS = [
    *test_once_calls.PROGRAMS,
    *test_own_gradients.PROGRAMS,
    test_own_gradients.Alone,
    *test_unfrozen.PROGRAMS,
    test_groups.RateByHand,
]
LAYOUTS = [(2, 1), (2, 2), (1, 4)]


def batch(strategy: uo.Strategy) -> Any:
    """Returns this worker's part of the batch, which has 12 samples: 3 or 6 each."""
    num_local = len(strategy.extended.worker_devices)
    first = strategy.extended.first_replica_id
    size = len(X) // strategy.num_replicas_in_sync
    parts = [slice(size * i, size * (i + 1)) for i in range(first, first + num_local)]
    return tuple(uo.PerReplica([whole[part] for part in parts]) for whole in (X, Y))


@pytest.mark.parametrize("program", PROGRAMS)
def test_workers_end_with_the_weights_of_one_device(program: type[Program]) -> None:
    def trained(strategy: uo.Strategy) -> list[Tensor]:
        with strategy.scope():
            made = program()
        for _ in range(3):
            strategy.run(made.step, args=batch(strategy))
        return made.result()

    (expected,) = on_strategies(1, trained)
    bits = None
    for num_workers, num_replicas in LAYOUTS:
        for found in on_strategies(num_workers, trained, num_replicas=num_replicas):
            same(found, expected)
        if num_workers * num_replicas == 4:
            bits = bits or found
            assert all(map(torch.equal, found, bits))


def test_gradients_that_differ_between_workers_are_reduced() -> None:
    def trained(strategy: uo.Strategy) -> list[Tensor]:
        with strategy.scope():
            made = Program()

        def step(x: Tensor, y: Tensor) -> None:
            made.backward(x, y)
            for p in made.model.parameters():
                assert p.grad is not None
                p.grad.add_(float(replica_id()))
            made.optimizer.step()

        strategy.run(step, args=batch(strategy))
        return made.result()

    first, second = on_strategies(2, trained)
    (both,) = on_strategies(1, trained, num_replicas=2)

    same(first, second)
    same(first, both)


def test_rates_that_differ_between_workers_are_refused() -> None:
    def refused(strategy: uo.Strategy) -> str:
        with strategy.scope():
            made = Program()

        def step() -> None:
            made.optimizer.param_groups[0]["lr"] = 0.5 + replica_id()

        with pytest.raises(ReplicaMismatchError) as error:
            strategy.run(step)
        return str(error.value)

    for message in on_strategies(2, refused):
        assert "`param_groups[0]['lr']` of SGD to different values" in message


def test_losses_that_differ_between_workers_are_refused() -> None:
    def refused(strategy: uo.Strategy) -> str:
        with strategy.scope():
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(Program().optimizer)
        with pytest.raises(ReplicaMismatchError) as error:
            strategy.run(lambda: scheduler.step(0.5 + replica_id()))
        return str(error.value)

    for message in on_strategies(2, refused):
        assert "ReduceLROnPlateau.step() happens once" in message
        assert "[0.5], [1.5]" in message


def test_a_write_on_the_only_replica_of_a_worker_is_refused() -> None:
    def refused(strategy: uo.Strategy) -> str:
        with strategy.scope():
            made = Program()

        def step(x: Tensor, y: Tensor) -> None:
            loss(made.model, x, y).backward()
            next(made.model.parameters()).data.add_(1)

        with pytest.raises(ContextError) as error:
            strategy.run(step, args=batch(strategy))
        return str(error.value)

    for message in on_strategies(2, refused):
        assert "`0.weight` of Sequential" in message
