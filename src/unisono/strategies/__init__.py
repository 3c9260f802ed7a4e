"""Strategies: how a training program is spread over devices."""

from unisono.strategies.extended import StrategyExtended
from unisono.strategies.mirrored import DefaultStrategy, MirroredStrategy, OneDeviceStrategy
from unisono.strategies.strategy import RunOptions, Strategy

__all__ = [
    "DefaultStrategy",
    "MirroredStrategy",
    "OneDeviceStrategy",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
]
