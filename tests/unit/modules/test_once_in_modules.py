"""`unisono.once` in the methods of a module, whose `self` is the clone of a replica."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as uo

Make = Callable[..., uo.MirroredStrategy]


class Average(nn.Module):
    """Changes everything that a module can have."""

    written: Tensor
    replaced: Tensor

    def __init__(self, call: Callable[[Average, Tensor], Any]) -> None:
        super().__init__()
        self.call = call
        self.weight, self.average = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(()))
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.count = 0
        self.old: int | None = 1

    @torch.no_grad()
    def update(self, own: Tensor | None = None) -> None:
        average = self.average if own is None else own
        average.data = average.data * 0.5 + self.weight.data
        self.weight.mul_(2)
        self.written += 1
        self.replaced = self.replaced + 1
        self.count += 1
        del self.old
        self.old = None

    def forward(self) -> Tensor:
        self.call(self, self.average)
        found = [self.weight, self.average, self.written, self.replaced]
        return torch.stack([*(one.detach() for one in found), torch.tensor(self.count)])


WAYS: dict[str, Callable[[Average, Tensor], Any]] = {
    "method": lambda module, _: uo.once(module.update),
    "closure": lambda module, _: uo.once(lambda: module.update()),
    "partial": lambda module, _: uo.once(functools.partial(module.update)),
    "argument": lambda module, _: uo.once(Average.update, module),
    "parameter": lambda module, own: uo.once(lambda: module.update(own)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_changes_itself_does_as_on_one_device(
    mirrored: Make, memories: str, way: str
) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = Average(WAYS[way])

    for expected in ([2, 1, 1, 1, 1], [4, 2.5, 2, 2, 2], [8, 5.25, 3, 3, 3]):
        found = strategy.experimental_local_results(strategy.run(model))

        assert [one.tolist() for one in found] == [expected] * 2
        outside = [model.weight, model.average, model.written, model.replaced]
        assert [*(one.item() for one in outside), model.count] == expected
        assert model.old is None


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_with_max_norm_shortens_what_all_look_up_once(
    mirrored: Make, memories: str, make: Any
) -> None:
    strategy = mirrored()
    with strategy.scope():
        table = make(5, 3, max_norm=0.5)
        optimizer = torch.optim.SGD(table.parameters(), lr=2.0)
    alone = copy.deepcopy(table)
    optimizer_alone = torch.optim.SGD(alone.parameters(), lr=2.0)

    def step(table: Any, optimizer: Any, rows: Tensor) -> None:
        optimizer.zero_grad()
        table(rows).square().sum(-1).mean().backward()
        optimizer.step()

    batch = torch.tensor([[0, 1], [1, 1], [3, 0]])
    for rows in strategy.experimental_distribute_dataset([batch, batch]):
        strategy.run(step, args=(table, optimizer, rows))
        step(alone, optimizer_alone, batch)

    torch.testing.assert_close(table.weight, alone.weight)
