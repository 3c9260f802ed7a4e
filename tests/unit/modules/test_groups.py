"""What a step sees and changes of an optimizer: `param_groups` and `state`."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_replica import replica_id
from torch import Tensor, nn
from torch.optim import lr_scheduler

import unisono as uo
from unisono.errors import ContextError, ReplicaMismatchError
from unit.modules.test_once_calls import Program, X, Y, check_weights, split

Make = Callable[..., uo.MirroredStrategy]


class RateByHand(Program):
    """A learning rate that is halved, warmed up and scheduled, all in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def step(self, x: Tensor, y: Tensor) -> None:
        group = self.optimizer.param_groups[0]
        group["lr"] *= 0.5
        self.backward(x, y)
        self.optimizer.step()
        for own in self.optimizer.param_groups:
            own["lr"] *= 3
            own["momentum"] = 0.8
        before = group["lr"]
        self.scheduler.step()
        assert group["lr"] == pytest.approx(0.9 * before)
        group["weight_decay"] = 0.1

    def result(self) -> list[Tensor]:
        rate = torch.tensor(self.optimizer.param_groups[0]["lr"], dtype=torch.float64)
        return [rate, *super().result()]


class Schedulers(RateByHand):
    """Schedulers that consist of others."""

    def __init__(self) -> None:
        Program.__init__(self)
        first = lr_scheduler.ConstantLR(self.optimizer, 0.5, total_iters=1)
        second = lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.in_turn = lr_scheduler.SequentialLR(self.optimizer, [first, second], [1])
        self.chained = lr_scheduler.ChainedScheduler([second])

    def step(self, x: Tensor, y: Tensor) -> None:
        self.backward(x, y)
        self.optimizer.step()
        self.in_turn.step()
        self.chained.step()


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("program", [RateByHand, Schedulers])
def test_replicas_end_with_the_weights_of_one_device(
    mirrored: Make, memories: str, program: type[Program], num_replicas: int
) -> None:
    check_weights(mirrored, program, num_replicas)


@pytest.fixture
def made(mirrored: Make) -> tuple[uo.MirroredStrategy, Program]:
    strategy = mirrored(2)
    with strategy.scope():
        return strategy, Program()


Made = tuple[uo.MirroredStrategy, Program]


def test_different_values_are_refused(made: Made) -> None:
    strategy, program = made

    def step() -> None:
        program.optimizer.param_groups[0]["lr"] = 0.1 * replica_id() + 0.5

    message = r"`param_groups\[0\]\['lr'\]` of SGD to different values: 0.5, 0.6"
    with pytest.raises(ReplicaMismatchError, match=message):
        strategy.run(step)
    assert program.optimizer.param_groups[0]["lr"] == 0.1


def test_a_value_that_one_replica_sets_is_refused(made: Made) -> None:
    strategy, program = made

    def step() -> None:
        if replica_id() == 1:
            program.optimizer.param_groups[0]["lr"] = 0.5

    with pytest.raises(ReplicaMismatchError, match=r"as it was, 0\.5"):
        strategy.run(step)


def test_what_is_set_once_for_all_is_seen_at_once(made: Made) -> None:
    strategy, program = made

    def step() -> float:
        group = program.optimizer.param_groups[0]

        def double() -> None:
            program.optimizer.param_groups[0]["lr"] *= 2

        uo.once(double)
        return float(group["lr"])

    found = strategy.experimental_local_results(strategy.run(step))

    assert set(found) == {0.2}
    assert program.optimizer.param_groups[0]["lr"] == 0.2


def test_a_rate_that_is_a_tensor(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = nn.Linear(1, 1)
        rate = torch.tensor(1.0)
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)

    strategy.run(lambda: optimizer.param_groups[0]["lr"].mul_(0.5).item())

    assert rate.item() == 0.5
    assert optimizer.param_groups[0]["lr"] is rate


@pytest.mark.parametrize(
    "change",
    [
        lambda optimizer: optimizer.param_groups.append({"params": []}),
        lambda optimizer: optimizer.param_groups[0].update(params=[]),
        lambda optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
        lambda optimizer: setattr(optimizer, "param_groups", []),
    ],
)
def test_other_changes_are_for_all_replicas(made: Made, change: Callable[[Any], Any]) -> None:
    strategy, program = made

    def step() -> None:
        change(program.optimizer)

    with pytest.raises(ContextError, match=r"SGD.*unisono.once\("):
        strategy.run(step)
    strategy.run(lambda: uo.once(step))


def test_the_state_is_found_under_the_parameters_of_a_replica(made: Made) -> None:
    strategy, program = made
    kept = list(program.model.parameters())

    def step(x: Tensor, y: Tensor) -> list[int]:
        state = program.optimizer.state
        first = next(program.model.parameters())
        known = [len(state[first]), first in state, state.get(first) is state[first]]
        program.backward(x, y)
        program.optimizer.step()
        known += [first in state, len(state[first]), state[kept[0]] is state[first]]
        return known

    found = strategy.run(step, args=split(2))

    assert strategy.experimental_local_results(found)[0] == [0, True, True, True, 1, True]
    assert set(program.optimizer.state) == set(kept)
    state = program.optimizer.state_dict()
    program.optimizer.load_state_dict(state)
    assert len(state["state"]) == len(kept)


def test_the_state_is_found_after_it_was_loaded(made: Made) -> None:
    strategy, program = made
    program.backward(X, Y)
    program.optimizer.step()
    program.optimizer.load_state_dict(copy.deepcopy(program.optimizer.state_dict()))

    def step() -> int:
        first = next(program.model.parameters())
        return len(program.optimizer.state[first])

    assert strategy.run(step) == 1


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_an_optimizer_have_plain_groups_and_state(
    made: Made, duplicate: Callable[[Any], Any]
) -> None:
    strategy, program = made
    strategy.run(lambda: len(program.optimizer.param_groups))

    other = duplicate(program.optimizer)

    assert type(other) is torch.optim.SGD
    assert type(other.state) is defaultdict
    assert type(other.param_groups) is list


def test_a_scheduler_is_given_one_value(made: Made) -> None:
    strategy, program = made
    with strategy.scope():
        scheduler = lr_scheduler.ReduceLROnPlateau(program.optimizer, patience=0)

    def step(losses: Tensor, *, is_reduced: bool) -> None:
        context = uo.get_replica_context()
        assert context is not None
        if is_reduced:
            losses = context.all_reduce("MEAN", losses * context.weight)
        scheduler.step(losses)

    parts = uo.PerReplica([torch.tensor(1.0), torch.tensor(2.0)])
    message = r"ReduceLROnPlateau.step\(\).*different values: 1.0, 2.0.*all_reduce"
    with pytest.raises(ReplicaMismatchError, match=message):
        strategy.run(step, args=(parts,), kwargs={"is_reduced": False})
    strategy.run(step, args=(parts,), kwargs={"is_reduced": True})
    assert scheduler.best == 1.5


def test_a_scaler_is_given_one_scale(made: Made) -> None:
    strategy, _ = made
    with strategy.scope():
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))

    with pytest.raises(ReplicaMismatchError, match=r"GradScaler.update\(\).*: 1.0, 2.0"):
        strategy.run(lambda: scaler.update(1.0 + replica_id()))
    strategy.run(lambda: scaler.update(4.0))
    assert scaler.get_scale() == 4.0


def updated(program: Program, x: Tensor, y: Tensor) -> None:
    program.backward(x, y)
    program.optimizer.step()


def own_number(program: Program) -> None:
    own = program.optimizer.state[next(program.model.parameters())]
    own["mine"] = own.get("mine", 0) + 1


def own_entry(program: Program) -> None:
    state: Any = program.optimizer.state
    state["mine"] = state.get("mine", 0) + 1


def momentum(program: Program) -> None:
    program.optimizer.state[next(program.model.parameters())]["momentum_buffer"].mul_(0.5)


def clearing(program: Program) -> None:
    program.optimizer.state.clear()


@pytest.mark.parametrize("write", [own_number, own_entry, momentum, clearing])
@pytest.mark.parametrize("goes_on", [True, False])
def test_the_state_is_written_once(
    made: Made, write: Callable[[Program], None], *, goes_on: bool
) -> None:
    strategy, program = made
    program.optimizer.param_groups[0]["momentum"] = 0.9
    parts = split(2)
    strategy.run(updated, args=(program, *parts))

    def step(x: Tensor, y: Tensor, *, is_once: bool) -> None:
        # To look at it is no write, also where there is none.
        for p in program.model.parameters():
            program.optimizer.state.get(p)
        len(program.optimizer.state["other"])  # type: ignore[index]
        uo.once(write, program) if is_once else write(program)
        if goes_on:
            updated(program, x, y)

    strategy.run(step, args=parts, kwargs={"is_once": True})
    strategy.run(updated, args=(program, *parts))
    with pytest.raises(ContextError, match=r"wrote to the state of SGD.*unisono\.once"):
        strategy.run(step, args=parts, kwargs={"is_once": False})


def test_hooks_of_an_optimizer_are_registered_outside(made: Made) -> None:
    strategy, program = made
    calls = []

    def register() -> None:
        program.optimizer.register_step_post_hook(lambda *_: calls.append(1))

    with pytest.raises(ContextError, match=r"register_step_post_hook\(\).*outside"):
        strategy.run(register)
    strategy.run(lambda: uo.once(register))
    strategy.run(updated, args=(program, *split(2)))
    assert calls == [1]
