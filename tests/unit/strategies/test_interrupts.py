"""Ctrl-C may come between any two instructions of ours, and the next run must still be right."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as uo
from unisono.contexts.current import entered, stack
from unisono.engines import drawing
from unisono.functions.watching import Watching
from unisono.gradients.reducer import GradientReducer
from unisono.modules.attributes import Attributes
from unisono.modules.buffers import Buffers
from unisono.modules.front import Fronts
from unisono.modules.mirrors import Mirrors
from unisono.modules.statistics import Flat
from unisono.modules.written import Watch

MOST_CALLS = 8
Make = Callable[..., uo.MirroredStrategy]


class Interrupt:
    """Presses Ctrl-C at the beginning of one call of a method, on the thread of the program."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self._num_left = 0
        method: Any = getattr(owner, name)
        program = threading.current_thread()

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            if self._num_left and threading.current_thread() is program:
                self._num_left -= 1
                if self._num_left == 0:
                    raise KeyboardInterrupt
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, interrupted)

    def comes_in(self, number: int, run: Callable[[], object]) -> bool:
        """Runs, with the interrupt at this call, and returns whether there was one."""
        self._num_left = number
        try:
            run()
        except KeyboardInterrupt:
            return True
        finally:
            self._num_left = 0
        return False


def trained(
    strategy: uo.Strategy,
    before: Callable[[Callable[[], object]], object],
    mark: Callable[[Any], Any] = lambda step: step,
) -> list[Tensor]:
    """Returns what two steps make of a model, which has been run `before` in some way."""
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = uo.PerReplica(list(torch.randn(8, 3, dtype=torch.float64).split(4)))
    state = {name: value.clone() for name, value in model.state_dict().items()}

    @mark
    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    def run() -> None:
        strategy.run(step, (batches,))

    before(run)
    assert not stack.entered
    assert not drawing.is_on()
    assert type(optimizer) is torch.optim.SGD
    assert {type(module) for module in model} == {nn.Linear, nn.BatchNorm1d}
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    model.load_state_dict(state)
    run()
    run()
    return list(model.state_dict().values())


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Attributes, "give"),
        (Buffers, "_install"),
        (Buffers, "_lay_out"),
        (Fronts, "capture"),
        (Fronts, "put_up"),
        (Fronts, "take_down"),
        (GradientReducer, "_make_packs"),
        (Mirrors, "_leaves_for"),
        (Flat, "give"),
        (Watch, "_add_copies"),
        (Watch, "note_parts"),
        (Watch, "stamp"),
        (drawing, "__exit__"),
        (entered, "__exit__"),
        (threading.Thread, "start"),
    ],
)
def test_ctrl_c_within_our_own_code_breaks_nothing(
    mirrored: Make, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    wanted = trained(mirrored(2), lambda run: run())
    interrupt = Interrupt(monkeypatch, owner, name)

    for number in range(1, MOST_CALLS + 1):
        come_in, came = functools.partial(interrupt.comes_in, number), []
        found = trained(mirrored(2), lambda run: came.append(come_in(run)))  # noqa: B023
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        if not came[0]:
            break


def test_ctrl_c_leaves_nobody_watching(mirrored: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    enter = Watching.__enter__

    def interrupted(watching: Watching) -> None:
        enter(watching)
        raise KeyboardInterrupt

    monkeypatch.setattr(Watching, "__enter__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mirrored(2).run(uo.function(lambda: torch.ones(1) + 1))
    assert sys.getprofile() is None


@pytest.mark.parametrize("name", ["put_up", "take_down"])
def test_ctrl_c_in_a_replay_breaks_nothing(
    mirrored: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    wanted = trained(mirrored(2), lambda run: run())
    method, come = getattr(Fronts, name), list[bool]()

    def replayed(run: Callable[[], object]) -> None:
        # Two that run eagerly, the one that is captured, and a replay.
        for _ in range(4):
            run()

        def interrupted(fronts: Fronts) -> None:
            if come or name == "put_up":
                method(fronts)
            if not come:
                come.append(True)
                raise KeyboardInterrupt

        monkeypatch.setattr(Fronts, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()

    found = trained(mirrored(2), replayed, uo.function)
    assert come
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
