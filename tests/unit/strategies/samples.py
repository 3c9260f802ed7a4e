"""Batches of few samples, as a strategy distributes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo


def numbers(num_samples: int) -> Tensor:
    return torch.arange(2.0, 2.0 + num_samples, dtype=torch.float64)


def distributed(strategy: uo.Strategy, *tensors: Tensor, **options: Any) -> Any:
    loader = DataLoader(TensorDataset(*tensors), batch_size=len(tensors[0]))
    dataset = strategy.experimental_distribute_dataset(loader, uo.InputOptions(**options))
    (batch,) = dataset
    return batch
