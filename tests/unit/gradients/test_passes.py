"""A backward pass of replicas enters Python once per pack, and not once per gradient."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as uo
from unisono.devices import Device
from unisono.experimental import CommunicationOptions
from unisono.gradients import reducer as reducing
from unisono.gradients.passes import OwnPass
from unisono.strategies import Strategy, StrategyExtended


@pytest.fixture
def make() -> Iterator[Callable[..., Strategy]]:
    made: list[Strategy] = []

    def strategy(bytes_per_pack: int = 0, num_replicas: int = 2, **kwargs: Any) -> Strategy:
        devices = tuple(Device("cpu", i) for i in range(num_replicas))
        options = CommunicationOptions(bytes_per_pack=bytes_per_pack)
        ops = uo.ReductionToOneDevice()
        made.append(Strategy(StrategyExtended(devices, ops, options=options, **kwargs)))
        return made[-1]

    yield strategy
    for one in made:
        one.close()


def chain(num_layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(num_layers)))


def batches() -> uo.PerReplica:
    return uo.PerReplica([torch.full((2, 4), 1.0), torch.full((2, 4), 3.0)])


def expected(make_loss: Callable[[nn.Module, Tensor], Tensor], num_layers: int) -> list[Tensor]:
    """The mean of the gradients, on one device."""
    model = chain(num_layers)
    for x in batches().values:
        (make_loss(model, x) / 2).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def calls_in_autograd(strategy: Strategy, model: nn.Module) -> int:
    """How many hooks autograd calls in one backward pass of a replica."""

    def step(x: Tensor) -> int:
        model(x).square().mean().backward()
        # On a replica, these are its own leaves.
        return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())

    for _ in range(2):
        strategy.run(step, args=(batches(),))
    found: int = strategy.run(step, args=(batches(),))
    return found


@pytest.mark.parametrize("num_layers", [1, 20])
def test_gradients_of_one_pack_call_nobody(make: Callable[..., Strategy], num_layers: int) -> None:
    strategy = make()
    with strategy.scope():
        model = chain(num_layers)

    assert calls_in_autograd(strategy, model) == 0


def test_each_pack_but_the_last_calls_once(make: Callable[..., Strategy]) -> None:
    # Five matrices of 64 bytes to a pack.
    strategy = make(bytes_per_pack=4 * 64)
    with strategy.scope():
        model = chain(20)

    assert calls_in_autograd(strategy, model) == 3


def test_the_hook_of_a_pack_moves_to_the_gradient_that_comes_last(
    make: Callable[..., Strategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    early: Counter[int] = Counter()
    original = reducing.GradientReducer._pack_is_full

    def counted(self: Any, current: Any, number: int) -> None:
        early[number] += 1
        original(self, current, number)

    monkeypatch.setattr(reducing.GradientReducer, "_pack_is_full", counted)
    strategy = make(bytes_per_pack=1 * 64)
    with strategy.scope():
        model = chain(4)

    def loss(own: Any, x: Tensor) -> Tensor:
        # The layers that were made last are used first, and so get their gradients last.
        for layer in reversed(own):
            x = layer(x)
        return x.square().mean()

    def step(x: Tensor) -> None:
        model.zero_grad()
        loss(model, x).backward()

    for run in range(4):
        early.clear()
        strategy.run(step, args=(batches(),))
        assert all(map(torch.allclose, gradients(model), expected(loss, 4)))
        if run > 1:
            assert early == {0: 1}


def test_gradients_that_are_added_to_count_as_new_and_others_do_not(
    make: Callable[..., Strategy],
) -> None:
    strategy = make(reduce_gradients=uo.ReduceOp.SUM)
    with strategy.scope():
        used, other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def step(x: Tensor) -> Tensor:
        (used(x) + other(x)).sum().backward()
        # Written to, but not by autograd.
        other.weight.grad.mul_(2)  # type: ignore[union-attr]
        used(x).sum().backward()
        return torch.cat([one.weight.grad for one in (used, other)]).flatten()  # type: ignore[misc]

    result = strategy.run(step, args=(uo.PerReplica([torch.ones(1, 1), 2 * torch.ones(1, 1)]),))

    assert [own.tolist() for own in result.values] == [[6.0, 6.0]] * 2


@pytest.mark.parametrize("call", [torch.autograd.backward, Tensor.backward])
def test_every_way_to_call_backward_reduces(
    make: Callable[..., Strategy], call: Callable[[Tensor], None]
) -> None:
    strategy = make()
    with strategy.scope():
        model = chain(2)

    def step(x: Tensor) -> None:
        call(model(x).square().mean())

    strategy.run(step, args=(batches(),))

    def loss(own: nn.Module, x: Tensor) -> Tensor:
        return own(x).square().mean()  # type: ignore[no-any-return]

    assert all(map(torch.allclose, gradients(model), expected(loss, 2)))


def test_a_replica_that_adds_to_no_gradient_does_not_hide_one_that_does(
    make: Callable[..., Strategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = make()
    with strategy.scope():
        model = chain(1)
    is_asked, has_told = threading.Event(), threading.Event()

    def adds(_: object) -> bool:
        context = uo.get_replica_context()
        assert context is not None
        if context.replica_id_in_sync_group == 0:
            # The other one has begun to look, and goes on when this one has said so.
            return is_asked.wait(30)
        is_asked.set()
        assert has_told.wait(30)
        return False

    monkeypatch.setattr(OwnPass, "adds", property(adds))

    def step(x: Tensor) -> None:
        loss = model(x).square().mean()
        loss.register_hook(lambda _: has_told.set())
        loss.backward()

    strategy.run(step, args=(batches(),))

    assert strategy.extended.gradients.has_added
