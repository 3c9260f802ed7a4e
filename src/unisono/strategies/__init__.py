"""Strategies: how a training program is spread over devices."""

from unisono.strategies.default import DefaultStrategy
from unisono.strategies.extended import StrategyExtended
from unisono.strategies.mirrored import MirroredStrategy, OneDeviceStrategy
from unisono.strategies.steps import MultiStepContext
from unisono.strategies.strategy import Strategy

__all__ = [
    "DefaultStrategy",
    "MirroredStrategy",
    "MultiStepContext",
    "OneDeviceStrategy",
    "Strategy",
    "StrategyExtended",
]
