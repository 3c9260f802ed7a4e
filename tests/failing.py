"""A function of autograd whose backward pass fails."""

from typing import Any

import torch
from torch import Tensor


class Failing(torch.autograd.Function):
    """Ends a backward pass after the gradients of later layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise ValueError("not this time")
