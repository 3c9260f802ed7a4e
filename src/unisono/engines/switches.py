"""Switches of torch that all threads share, and that a block sets back at its end.

A replica that leaves such a block switches for the others, too, and what it sets back may be what
another one has set. So nobody would know which kernels a replica uses, also after the run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import attention

from unisono.contexts import current_replica
from unisono.errors import UnsupportedError
from unisono.sharing import computed_once, in_place_of


@computed_once
def refuse_switches() -> None:
    """From now on, several replicas of one process may not enter such blocks."""
    _refuse(attention, "_sdpa_kernel", "torch.nn.attention.sdpa_kernel")
    for module in (torch.backends.cudnn, torch.backends.mkldnn):
        _refuse(module, "flags", f"{module.__name__}.flags")


def _refuse(module: Any, name: str, shown: str) -> None:
    original = getattr(module, name)

    @in_place_of(module, name)
    def checked(*args: Any, **kwargs: Any) -> Any:
        context = current_replica()
        if context is not None and context.num_local_replicas > 1:
            raise UnsupportedError(
                f"The step calls `{shown}()`, which switches for all threads of this process, and "
                f"so for all {context.num_local_replicas} replicas in it. Enter the block around "
                "`strategy.run`, or start one process per replica (`unisono launch -n N SCRIPT`)."
            )
        return original(*args, **kwargs)
