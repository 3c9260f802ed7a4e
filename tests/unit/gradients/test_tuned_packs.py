"""The packs of gradients follow measured links, and the gradients keep their bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import unisono as uo
from unisono.costs import Link, Tuning
from unisono.costs.tuning import this_machine_in_words
from unisono.devices import Device


class Counting(uo.ReductionToOneDevice):
    """Counts the packs that are reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.num_packs = 0

    def reduce_in_place(
        self, reduce_op: uo.ReduceOp, batch: Sequence[Sequence[Tensor]], devices: tuple[Device, ...]
    ) -> bool:
        self.num_packs += 1
        return super().reduce_in_place(reduce_op, batch, devices)


def gradients(num_replicas: int) -> tuple[int, list[Tensor]]:
    """Returns the number of packs of 16 parameters of 256 KiB, and their gradients."""
    torch.manual_seed(1)
    ops = Counting()
    strategy = uo.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)], ops)
    with strategy.scope():
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))

    def step() -> None:
        model(torch.randn(3, 256)).square().sum().backward()

    try:
        strategy.run(step)
        strategy.run(step)
        found = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    finally:
        strategy.close()
    return ops.num_packs // 2, found


def write(path: Path, memory: Link, *, cpu: str | None = None) -> None:
    machine = this_machine_in_words()
    machine["cpu"] = cpu or machine["cpu"]
    path.write_text(Tuning(memory, memory, None, None, None, 1e10, machine, "today", "0").to_text())


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_tuning_changes_the_packs_and_no_bit(
    num_replicas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    untuned, expected = gradients(num_replicas)
    counts = {}
    for latency in (1e-9, 1e-2):
        path = tmp_path / f"{latency}.json"
        write(path, Link(latency, 1e10, 0.0))
        monkeypatch.setenv("UNISONO_TUNING", str(path))
        counts[latency], found = gradients(num_replicas)

        assert len(found) == 16
        assert all(map(torch.equal, found, expected))

    # 4 MiB together: with packs of 4 MiB all in one; else each alone, or all in one again.
    assert untuned == 1
    assert counts == {1e-9: 16, 1e-2: 1}


def test_a_named_tuning_of_another_machine_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "foreign.json", Link(1e-6, 1e10), cpu="another one")
    monkeypatch.setenv("UNISONO_TUNING", str(tmp_path / "foreign.json"))

    with pytest.raises(uo.errors.TuningError, match="another machine: cpu 'another one', here"):
        uo.MirroredStrategy(["cpu:0", "cpu:1"])
