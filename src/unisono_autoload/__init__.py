"""Tells torch of the backend "unisono" when torch is imported.

torch calls `register` at the end of `import torch`, in every program. So this package stands apart
from `unisono` and imports it only when a program asks for the backend.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from torch import distributed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup, Store


def register() -> None:
    """Makes `init_process_group("unisono")` work. May be called twice."""
    # torch 2.6 refuses a name that it has.
    if distributed.is_available() and not hasattr(distributed.Backend, "UNISONO"):
        distributed.Backend.register_backend("unisono", _create, devices=["cpu"])


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    from unisono.backend import UnisonoProcessGroup

    return UnisonoProcessGroup(store, rank, size, timeout)
