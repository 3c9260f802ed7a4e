"""What a rehearsal finds without a GPU."""

from __future__ import annotations

import torch
from torch import nn

import unisono as uo
from unisono.functions.rehearsal import outsiders


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
