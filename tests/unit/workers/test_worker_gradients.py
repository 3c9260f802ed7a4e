"""Gradients between workers, which here are threads."""

from __future__ import annotations

import gc
import sys
import weakref
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from worker_threads import on_strategies

import unisono as uo
from unisono.gradients.passes import Sender


class Refusal(torch.autograd.Function):
    """Computes nothing, and has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ArithmeticError("no gradient today")


def test_a_pass_that_failed_leaves_nothing_to_the_next() -> None:
    def train(strategy: uo.Strategy) -> list[Any]:
        with strategy.scope():
            model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(3)])

        def step(*, fails: bool) -> None:
            first, second, third = model
            # What is used last has its gradient first, so at first the second pack fills alone.
            refuse: Any = Refusal.apply
            branches = [refuse(third * 5), second * 7] if fails else [second * 7, third * 5]
            (sum(branches) + first).sum().backward()

        with pytest.raises(ArithmeticError):
            strategy.run(step, kwargs={"fails": True})
        model.zero_grad()
        strategy.run(step, kwargs={"fails": False})
        return [parameter.grad for parameter in model]

    # Every parameter is a pack, and the last one made is the first to be sent.
    options = uo.experimental.CommunicationOptions(bytes_per_pack=1)
    for found in on_strategies(2, train, options=options):
        assert found == [1.0, 7.0, 5.0]


class NoExchange(Exception):
    """An error that can be referred to weakly."""


@pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(),
    reason="without the lock, a thread frees what another has made when that one runs again",
)
def test_a_failed_exchange_keeps_nothing_in_memory() -> None:
    sender = Sender(lambda: None)
    sent: list[Future[None]] = []

    def fail() -> None:
        raise NoExchange

    def wait_in_vain() -> weakref.ref[NoExchange]:
        for _ in range(3):
            sender.send(fail, sent)
        try:
            sender.finish(sent)
        except NoExchange as error:
            return weakref.ref(error)
        raise AssertionError("nothing has failed")

    gc.disable()
    try:
        found = wait_in_vain()
        sender.close()
        assert found() is None
    finally:
        gc.enable()
    assert not sent


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str
)
def test_gradients_of_every_dtype_cross(dtype: torch.dtype, num_replicas: int) -> None:
    def train(strategy: uo.Strategy) -> list[Any]:
        with strategy.scope():
            model = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(2)])

        def step() -> None:
            context = uo.get_replica_context()
            assert context is not None
            (model[0].real * context.replica_id_in_sync_group).sum().backward()

        for _ in range(2):
            model.zero_grad()
            strategy.run(step)
        return [parameter.grad for parameter in model]

    mean = (2 * num_replicas - 1) / 2
    for used, unused in on_strategies(2, train, num_replicas=num_replicas):
        assert unused is None
        assert used.dtype == dtype
        assert used.tolist() == [mean, mean]


@pytest.mark.parametrize("op", [uo.ReduceOp.SUM, uo.ReduceOp.MEAN])
@pytest.mark.parametrize(("num_workers", "num_replicas"), [(1, 2), (2, 1), (2, 2), (3, 2)])
def test_what_one_replica_adds_is_added_once(
    num_workers: int, num_replicas: int, op: uo.ReduceOp
) -> None:
    num_all = num_workers * num_replicas

    def train(strategy: uo.Strategy) -> list[Any]:
        with strategy.scope():
            model = nn.ParameterList([nn.Parameter(torch.ones(())) for _ in range(2)])

        def step() -> Any:
            context = uo.get_replica_context()
            assert context is not None
            replica_id = context.replica_id_in_sync_group
            (model[0] * (replica_id + 1)).backward()
            # The second pass has something for the first parameter on the last replica only.
            is_last = replica_id + 1 == num_all
            (model[0] * 60 if is_last else model[1] * 60).backward()
            return torch.stack(
                [parameter.grad for parameter in model if parameter.grad is not None]
            )

        for _ in range(2):
            model.zero_grad()
            found = strategy.run(step)
        return [*strategy.experimental_local_results(found)]

    divisor = num_all if op is uo.ReduceOp.MEAN else 1
    first, second = sum(range(1, num_all + 1)) + 60.0, 60.0 * (num_all - 1)
    expected = torch.tensor([first, second]) / divisor
    for found in on_strategies(num_workers, train, num_replicas=num_replicas, reduce_gradients=op):
        for on_replica in found:
            torch.testing.assert_close(on_replica, expected)
