"""Forward-mode differentiation, in which replicas take turns.

torch has one level of it for all threads of a process, which would lose the tangents of other
replicas when one of them leaves it.
"""

from __future__ import annotations

from typing import Any

from torch._functorch import eager_transforms
from torch.autograd import forward_ad

from unisono.contexts import current_replica
from unisono.sharing import computed_once, in_place_of


@computed_once
def take_turns_in_forward_mode() -> None:
    """From now on, a replica enters a level of forward mode when no other is in one."""
    _wrap(forward_ad, "enter_dual_level", "exit_dual_level")
    # `torch.func.jvp`, and all that is made of it.
    _wrap(eager_transforms, "enter_jvp_nesting", "exit_jvp_nesting")


def _wrap(module: Any, enter_name: str, exit_name: str) -> None:
    enter, leave = getattr(module, enter_name), getattr(module, exit_name)

    @in_place_of(module, enter_name)
    def entered() -> Any:
        context = current_replica()
        if context is not None:
            context.meeting.enter_alone(context.local_id)
        try:
            return enter()
        except BaseException:
            if context is not None and module is forward_ad:
                # The other function is left also if it has failed.
                context.meeting.leave_alone(context.local_id)
            raise

    @in_place_of(module, exit_name)
    def left(**kwargs: Any) -> None:
        context = current_replica()
        try:
            leave(**kwargs)
        finally:
            if context is not None:
                context.meeting.leave_alone(context.local_id)
