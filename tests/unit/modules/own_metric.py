"""A metric that a user of torchmetrics has written."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics as tm
from torch import Tensor


class Own(tm.Metric):
    """States of all kinds, with defaults that are not zero."""

    full_state_update = False
    total: Tensor
    average: Tensor
    product: Tensor
    rows: list[Any]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(10.0), dist_reduce_fx="sum")
        self.add_state("average", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("product", torch.tensor(1.0), dist_reduce_fx=lambda x: x.prod(0))
        self.add_state("rows", [], dist_reduce_fx=None)

    def update(self, x: Tensor) -> None:
        self.total += x.sum()
        self.average = x.mean()
        self.product = self.product * x.prod()
        self.rows.append(x)

    def compute(self) -> tuple[Any, ...]:
        return self.total, self.average, self.product, torch.cat(self.rows)
