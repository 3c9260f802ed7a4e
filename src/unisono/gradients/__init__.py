"""Gradients of all replicas become one, while the backward pass still runs."""

from unisono.gradients.packs import Exchange, Reduction
from unisono.gradients.reducer import GradientReducer

__all__ = ["Exchange", "GradientReducer", "Reduction"]
