"""Strategies: how a training program is spread over devices."""

from unisono.strategies.extended import StrategyExtended
from unisono.strategies.mirrored import DefaultStrategy, MirroredStrategy, OneDeviceStrategy
from unisono.strategies.steps import MultiStepContext
from unisono.strategies.strategy import RunOptions, Strategy

__all__ = [
    "DefaultStrategy",
    "MirroredStrategy",
    "MultiStepContext",
    "OneDeviceStrategy",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
]
