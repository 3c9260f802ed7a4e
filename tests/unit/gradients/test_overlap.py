"""Gradients are reduced while the backward pass runs, each pack when it is ready."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as uo
from unisono.devices import Device
from unisono.strategies import Strategy, StrategyExtended

SECONDS = 20.0


class Watched(uo.ReductionToOneDevice):
    """Notes the shapes of what is reduced, in order."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.shapes: list[tuple[int, ...]] = []
        self.changed = threading.Condition()

    def reduce_in_place(
        self, reduce_op: uo.ReduceOp, batch: Sequence[Sequence[Tensor]], devices: tuple[Device, ...]
    ) -> bool:
        is_done = self.in_place and super().reduce_in_place(reduce_op, batch, devices)
        if is_done:
            self.note([tuple(tensors[0].shape) for tensors in batch])
        return is_done

    def batch_reduce_implementation(self, reduce_op: Any, pairs: Any, options: Any) -> Any:
        results = super().batch_reduce_implementation(reduce_op, pairs, options)
        self.note([tuple(value.values[0].shape) for value, _ in pairs])
        return results

    def note(self, shapes: list[tuple[int, ...]]) -> None:
        with self.changed:
            self.shapes += shapes
            self.changed.notify_all()

    def wait_for(self, shape: tuple[int, ...]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: shape in self.shapes, SECONDS), shape


@pytest.fixture(params=[True, False], ids=["in place", "batch"])
def ops(request: pytest.FixtureRequest) -> Watched:
    return Watched(in_place=request.param)


def test_the_last_layer_is_reduced_before_the_first_has_its_gradient(
    ops: Watched,
) -> None:
    devices = (Device("cpu", 0), Device("cpu", 1))
    options = uo.experimental.CommunicationOptions(bytes_per_pack=1)
    strategy = Strategy(StrategyExtended(devices, ops, options=options))
    with strategy.scope():
        model = nn.Sequential(
            nn.Linear(2, 3, bias=False), nn.Linear(3, 4, bias=False), nn.Linear(4, 5, bias=False)
        )

    def wait_for_the_others(_: Tensor) -> None:
        ops.wait_for((5, 4))
        ops.wait_for((4, 3))

    def step(x: Tensor) -> None:
        hidden = model[0](x)
        # The backward pass does not go on to the first layer unless the others are reduced.
        hidden.register_hook(wait_for_the_others)
        model[2](model[1](hidden)).sum().backward()

    for _ in range(2):
        ops.shapes.clear()
        strategy.run(step, args=(uo.PerReplica([torch.ones(1, 2), torch.ones(1, 2) * 3]),))
        assert ops.shapes == [(5, 4), (4, 3), (3, 2)]
    strategy.close()
