"""Caches of torch that all threads share. Replicas compute again what these would hold.

A thread that leaves a block of `torch.autocast`, or of `parametrize.cached`, empties the cache for
all threads. So how often a weight is cast, and with it how its gradients are rounded, would depend
on when other replicas leave their blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.utils import parametrize

from unisono.contexts import current_replica
from unisono.sharing import computed_once, in_place_of


def _is_among_others() -> bool:
    context = current_replica()
    return context is not None and context.num_replicas_in_sync > 1


@computed_once
def _setter() -> Any:
    """Lets replicas use no shared cache; returns torch's function that switches that of casts."""
    set_enabled: Any = torch.set_autocast_cache_enabled
    cached: Any = parametrize.cached

    @in_place_of(torch, "set_autocast_cache_enabled")
    def set_outside_replicas(enabled: bool) -> None:  # noqa: FBT001
        set_enabled(enabled and not _is_among_others())

    @in_place_of(parametrize, "cached")
    def cached_outside_replicas() -> AbstractContextManager[None]:
        return nullcontext() if _is_among_others() else cached()

    return set_enabled


@contextmanager
def without_shared_caches() -> Iterator[None]:
    """Within the block, a replica computes again what another thread may take out of a cache."""
    set_enabled = _setter()
    was_enabled = torch.is_autocast_cache_enabled()
    set_enabled(False)
    try:
        yield
    finally:
        set_enabled(was_enabled)
