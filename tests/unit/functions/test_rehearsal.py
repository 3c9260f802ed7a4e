"""What a rehearsal finds without a GPU."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_of_torch
from torch.utils.hooks import RemovableHandle

import unisono as uo
from unisono.functions.rehearsal import outsiders
from unit.functions.program_parts import recordings, replicas


def found(strategy: uo.Strategy, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Makes one update for the only replica, and returns why it could not be captured."""
    reasons: list[str] = []
    mirrors = strategy.extended.mirrors
    mirrors.fronts.put_up()
    try:
        with outsiders(mirrors, reasons.append):
            model(torch.ones(2, 3)).sum().backward()
            nn.MSELoss()(torch.ones(2), torch.ones(2))
            optimizer.step()
    finally:
        mirrors.fronts.take_down()
    return reasons


def test_what_belongs_to_the_strategy_can_be_captured() -> None:
    strategy = uo.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert found(strategy, model, optimizer) == []
    strategy.close()


def test_a_model_and_an_optimizer_from_outside_cannot() -> None:
    strategy = uo.OneDeviceStrategy("cpu:0")
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reasons = found(strategy, model, optimizer)
    assert [reason.split()[0] for reason in reasons] == ["Linear", "SGD"]
    strategy.close()


def test_what_other_threads_train_meanwhile_does_not_count() -> None:
    strategy = uo.OneDeviceStrategy("cpu:0")
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    in_update, may_go_on = threading.Event(), threading.Event()

    def stop(*_: object) -> None:
        in_update.set()
        may_go_on.wait(60)

    optimizer.register_step_pre_hook(stop)
    reasons: list[str] = []
    failures: list[Exception] = []

    def train() -> None:
        try:
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        except Exception as error:
            failures.append(error)

    with outsiders(strategy.extended.mirrors, reasons.append):
        thread = threading.Thread(target=train)
        thread.start()
        in_update.wait(60)
    may_go_on.set()
    thread.join(60)
    assert reasons == []
    assert failures == []
    strategy.close()


def test_rehearsals_that_fail_do_not_count() -> None:
    with replicas("cpu", 1) as strategy:

        @uo.function(strict=True)
        def step(place: torch.Tensor) -> torch.Tensor:
            return torch.ones(2).index_select(0, place)

        for _ in range(2):
            with pytest.raises(IndexError):
                strategy.run(step, args=(torch.tensor([7]),))
        for _ in range(4):
            strategy.run(step, args=(torch.tensor([1]),))
        assert len(recordings(strategy)) == 1


def test_functions_made_in_a_loop_have_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with replicas("cpu", 1) as strategy:
        often = uo.function(lambda x: x * 3)
        for _ in range(70):
            strategy.run(uo.function(lambda x: x * 2), args=(torch.ones(1),))
            strategy.run(often, args=(torch.ones(1),))
        assert len(recordings(strategy)) == 1
    assert len(caplog.records) == 1


def test_a_rehearsal_leaves_the_hooks_of_torch_alone() -> None:
    """Other threads may be going through them, which need not wait for a lock."""
    strategy = uo.OneDeviceStrategy("cpu:0")
    number, reasons = RemovableHandle.next_id, list[str]()
    with outsiders(strategy.extended.mirrors, reasons.append):
        assert not module_of_torch._global_forward_pre_hooks
    assert RemovableHandle.next_id == number
    assert sys.getprofile() is None
    strategy.close()
