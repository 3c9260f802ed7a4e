"""What counts in a batch may be something else than its samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import unisono as uo
from unisono.errors import UnsupportedError

IGNORED = -100
LABELS = {
    "uneven": [0, IGNORED, 2, IGNORED, IGNORED],
    "none on one replica": [0, 1, 2, IGNORED, IGNORED],
}


def count(part: Any) -> int:
    return int((part[1] != IGNORED).sum())


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("split", ["even", "tensorflow"])
def test_a_mean_over_some_labels_is_that_of_one_device(
    mirrored: Callable[..., uo.MirroredStrategy], labels: list[int], split: str
) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = nn.Linear(4, 3).double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.tensor(labels)
    expected = cross_entropy(model(x), y)
    grads = torch.autograd.grad(expected, list(model.parameters()))

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    options = uo.InputOptions(count_samples=count, split=split)
    (batch,) = strategy.experimental_distribute_dataset([(x, y)], options)
    losses = strategy.run(step, args=batch)

    torch.testing.assert_close(strategy.reduce("MEAN", losses), expected.detach())
    found = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(found, list(grads))


def test_a_count_must_be_a_number_of_samples(mirrored: Callable[..., uo.MirroredStrategy]) -> None:
    options = uo.InputOptions(count_samples=lambda _: -1)
    with pytest.raises(UnsupportedError, match="must return the number of samples"):
        list(mirrored(2).experimental_distribute_dataset([torch.ones(4)], options))
