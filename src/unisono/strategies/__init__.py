"""Strategies: how a training program is spread over devices."""

from unisono.strategies.config import ConfigProto, RunOptions
from unisono.strategies.extended import StrategyExtended
from unisono.strategies.mirrored import DefaultStrategy, MirroredStrategy, OneDeviceStrategy
from unisono.strategies.multi_worker import MultiWorkerMirroredStrategy
from unisono.strategies.steps import MultiStepContext
from unisono.strategies.strategy import Strategy

__all__ = [
    "ConfigProto",
    "DefaultStrategy",
    "MirroredStrategy",
    "MultiStepContext",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "RunOptions",
    "Strategy",
    "StrategyExtended",
]
