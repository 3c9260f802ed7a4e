"""A step may go on after a backward pass that has failed on all replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from failing import Failing
from torch import Tensor, nn
from worker_threads import on_strategies

import unisono as uo
from unisono.devices import Device
from unisono.errors import CommunicationError, ContextError, UnsupportedError
from unisono.experimental import CommunicationOptions
from unisono.strategies import Strategy, StrategyExtended
from unit.gradients.test_passes import chain

SIZES = [3, 1]
X = torch.linspace(-1, 1, 16).reshape(4, 4)


@pytest.fixture
def make() -> Iterator[Callable[..., Strategy]]:
    made: list[Strategy] = []

    def strategy(num_replicas: int, bytes_per_pack: int, op: str) -> Strategy:
        devices = tuple(Device("cpu", i) for i in range(num_replicas))
        options = CommunicationOptions(bytes_per_pack=bytes_per_pack)
        ops = uo.ReductionToOneDevice()
        kwargs = {"options": options, "reduce_gradients": uo.ReduceOp[op]}
        made.append(Strategy(StrategyExtended(devices, ops, **kwargs)))  # type: ignore[arg-type]
        return made[-1]

    yield strategy
    for one in made:
        one.close()


def fail(model: nn.Sequential, loss: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Makes a pass that ends after the gradients of the last three of four layers."""
    with pytest.raises(ValueError, match="not this time"):
        out = Failing.apply(model[0](x))  # type: ignore[no-untyped-call]
        loss(model[1:](out)).backward()


def trained(strategy: Strategy, op: str, parts: Any, *, clears: bool) -> list[Tensor]:
    """Returns the weights after steps with a pass that fails, and one that does not."""
    with strategy.scope():
        model = chain(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def loss(out: Tensor) -> Tensor:
        # Both are the mean of the whole batch.
        return out.square().mean() if op == "MEAN" else out.square().sum() / X.numel()

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        fail(model, loss, x)
        if clears:
            optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()

    for _ in range(3):
        strategy.run(step, args=(parts,))
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("op", ["MEAN", "SUM"])
@pytest.mark.parametrize("bytes_per_pack", [0, 1])
def test_replicas_end_with_the_weights_of_one_device(
    make: Callable[..., Strategy], op: str, bytes_per_pack: int, *, clears: bool
) -> None:
    expected = trained(make(1, 0, op), op, X, clears=clears)

    found = trained(make(2, bytes_per_pack, op), op, uo.PerReplica(X.split(SIZES)), clears=clears)

    torch.testing.assert_close(found, expected)


def test_an_update_with_the_gradients_of_a_failed_pass(make: Callable[..., Strategy]) -> None:
    def result(strategy: Strategy, parts: Any) -> Tensor:
        with strategy.scope():
            model = chain(4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            fail(model, lambda out: out.square().mean(), x)
            optimizer.step()

        strategy.run(step, args=(parts,))
        strategy.run(step, args=(X,))
        return list(model.parameters())[1].detach().clone()

    expected = result(make(1, 0, "MEAN"), X)

    for bytes_per_pack in (0, 1):
        found = result(make(2, bytes_per_pack, "MEAN"), uo.PerReplica(X.split(SIZES)))
        torch.testing.assert_close(found, expected)


def test_workers_that_may_have_exchanged_different_packs_do_not_go_on() -> None:
    def refused(strategy: uo.Strategy) -> list[str]:
        with strategy.scope():
            model = chain(4)
        messages = []

        def step(x: Tensor) -> None:
            fail(model, Tensor.sum, x)
            with pytest.raises(ContextError) as error:
                model(x).sum().backward()
            messages.append(str(error.value))

        # Afterwards, the workers may disagree about what they have exchanged.
        with suppress(CommunicationError):
            strategy.run(step, args=(X,))
        return messages

    options = CommunicationOptions(bytes_per_pack=1)
    with suppress(CommunicationError):
        for (message,) in on_strategies(2, refused, options=options):
            assert "Let the error end the step" in message


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_with_a_graph_are_refused(make: Callable[..., Strategy]) -> None:
    strategy = make(2, 0, "MEAN")
    with strategy.scope():
        model = chain(2)

    def step(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        # Of what is no parameter, a replica may have them.
        model(x).square().sum().backward(inputs=[x], create_graph=True)
        assert x.grad is not None
        x.grad.square().sum().backward()
        with pytest.raises(UnsupportedError, match=r"`1.weight` of Sequential.*autograd.grad"):
            model(x).sum().backward(create_graph=True, inputs=list(model[1].parameters()))
        return x.grad.detach()

    strategy.run(step, args=(X,))
