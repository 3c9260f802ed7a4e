"""The strategy of code that is under none: one replica, which needs no care."""

from __future__ import annotations

from unisono.contexts import ReplicaContext, set_outside
from unisono.devices import Device
from unisono.engines import ReplicaMeeting, Turns
from unisono.errors import ContextError
from unisono.hooks.hook import HookFunction
from unisono.reductions import ReductionToOneDevice
from unisono.strategies.extended import StrategyExtended
from unisono.strategies.strategy import Strategy


class DefaultStrategy(Strategy):
    """What `get_strategy()` gives outside every scope."""

    def __init__(self) -> None:
        super().__init__(StrategyExtended((Device("cpu", 0),), ReductionToOneDevice()))

    def register_comm_hook(self, state: object, hook: HookFunction) -> None:
        """Refuses: outside every scope no gradients are reduced."""
        raise ContextError(
            "The default strategy does not reduce gradients, so it takes no communication hook. "
            "Make a strategy, and call its `register_comm_hook()`."
        )


set_outside(ReplicaContext(DefaultStrategy().extended, 0, ReplicaMeeting(1, Turns(1))))
