"""An update that waits for the end of its run changes nothing that a step can see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import unisono as uo
from unisono.errors import CommunicationError
from unisono.modules.snapshot import Postponed


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Program:
    """One replica, as a worker of many has it, and a step that ends in many ways."""

    def __init__(
        self, stack: ExitStack, tail: Callable[[Program], Any], *, is_postponed: bool = True
    ) -> None:
        self.strategy = uo.MirroredStrategy(["cpu:0"])
        stack.callback(self.strategy.close)
        # With a hook, even a single replica is no plain program.
        self.strategy.register_comm_hook(None, allreduce_hook)
        torch.manual_seed(3)
        with self.strategy.scope():
            self.model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.tail = tail
        self.postponed = self.strategy.extended.mirrors.postponed = Postponed()
        self.is_postponed = is_postponed

    @property
    def weight(self) -> nn.Parameter:
        weight = self.model[0].weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def step(self) -> Any:
        self.own = self.weight
        self.view = self.own.detach()[1:]
        self.optimizer.zero_grad()
        self.scores = self.model(torch.ones(2, 4))
        self.loss = self.scores.square().sum()
        self.loss.backward(retain_graph=True)
        self.optimizer.step()
        return self.tail(self)

    def run(self) -> tuple[bool, Any]:
        """Returns whether the update has waited for the end of the run, and what there is then."""
        self.postponed.is_on = self.is_postponed
        before = self.weight.detach().clone()
        try:
            result = self.strategy.run(self.step)
        except (RuntimeError, uo.errors.UnisonoError) as error:
            result = type(error)
        has_waited = torch.equal(self.weight, before)
        self.postponed.make()
        return has_waited, _bits([result, *self.state()])

    def state(self) -> list[Any]:
        states = [one for state in self.optimizer.state.values() for one in state.values()]
        grads = [p.grad for p in self.model.parameters()]
        return [*self.model.parameters(), *states, *grads, self.scheduler.get_last_lr()]


def _bits(values: list[Any]) -> list[Any]:
    return [one.tolist() if isinstance(one, Tensor) else one for one in values]


def _fails(program: Program) -> None:
    raise RuntimeError("after the update")


def _sets_rate(program: Program) -> None:
    program.optimizer.param_groups[0]["lr"] = 0.7


def _trains_again(program: Program) -> None:
    program.model(torch.ones(1, 4)).sum().backward()


UNSEEN: dict[str, Callable[[Program], Any]] = {
    "nothing": lambda _: None,
    "the loss": lambda program: program.loss.detach(),
    "a number": lambda program: program.loss.item(),
    "a metric": lambda program: (program.scores > 0).sum(),
    "gradients cleared": lambda program: program.optimizer.zero_grad(),
}
SEEN: dict[str, Callable[[Program], Any]] = {
    "gradients of the module cleared": lambda program: program.model.zero_grad(),
    "the model": lambda program: program.model(torch.ones(1, 4)),
    "a parameter": lambda program: program.weight.sum(),
    "a parameter from before": lambda program: program.own * 2,
    "a view from before": lambda program: program.view.sum(),
    "data": lambda program: program.weight.data.sum().item(),
    "numpy": lambda program: program.weight.detach().numpy().tolist(),
    "the state of the model": lambda program: program.model.state_dict()["0.bias"],
    "the state of the optimizer": lambda program: len(program.optimizer.state),
    "gradients set to zero": lambda program: program.optimizer.zero_grad(set_to_none=False),
    "another learning rate": _sets_rate,
    "a scheduler": lambda program: program.scheduler.step(),
    "a second update": lambda program: program.optimizer.step(),
    "a second backward pass": _trains_again,
    "an old graph": lambda program: program.loss.backward(),
    "an old graph without leaves": lambda program: torch.autograd.grad(program.loss, program.own),
    "code for all": lambda program: uo.once(lambda: program.weight.sum().item()),
    "an error": _fails,
}


@pytest.mark.parametrize("tail", [*UNSEEN, *SEEN])
def test_a_step_cannot_tell_that_its_update_waits(stack: ExitStack, tail: str) -> None:
    found = []
    for is_postponed in (False, True):
        program = Program(stack, {**UNSEEN, **SEEN}[tail], is_postponed=is_postponed)
        runs = [program.run() for _ in range(3)]
        found.append([values for _, values in runs])
        assert {has_waited for has_waited, _ in runs} == {is_postponed and tail in UNSEEN}

    assert found[0] == found[1]


def test_an_update_that_waited_is_not_made_if_workers_are_lost(stack: ExitStack) -> None:
    def fail(_: Program) -> None:
        raise CommunicationError("A worker was lost.")

    program = Program(stack, fail)
    has_waited, _ = program.run()
    assert has_waited

    program.postponed.is_on = True
    before = _bits([*program.model.parameters()])
    with pytest.raises(CommunicationError):
        program.strategy.run(program.step)
    program.postponed.forget()
    program.postponed.make()

    assert _bits([*program.model.parameters()]) == before


def test_an_update_that_the_program_watches_does_not_wait(stack: ExitStack) -> None:
    program = Program(stack, lambda _: None)
    program.optimizer.register_step_post_hook(lambda *_: None)

    assert not program.run()[0]


def test_a_result_that_shows_the_update_is_seen(stack: ExitStack) -> None:
    program = Program(stack, lambda program: program.weight)
    program.postponed.is_on = True
    before = program.weight.tolist()
    result = program.strategy.run(program.step)

    program.postponed.look_at(torch.ones(3))
    assert program.weight.tolist() == before
    program.postponed.look_at([{"result": result}])
    assert program.weight.tolist() != before


def test_an_update_in_a_mode_of_the_program_does_not_wait(stack: ExitStack) -> None:
    program = Program(stack, lambda _: None)
    step = program.step

    def in_mode() -> Any:
        with torch.device("cpu"):
            return step()

    program.step = in_mode  # type: ignore[method-assign]

    assert not program.run()[0]
