"""Strategies of one worker that gets other replicas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import unisono as uo
from unisono.communicators import IdentityCommunicator
from unisono.reductions import ReductionToOneDevice


@contextmanager
def strategy_of(num_replicas: int, **settings: Any) -> Iterator[uo.MultiWorkerMirroredStrategy]:
    strategy = uo.MultiWorkerMirroredStrategy(num_replicas=num_replicas, **settings)
    try:
        yield strategy
    finally:
        strategy.close()


def relayout(strategy: uo.MultiWorkerMirroredStrategy, num_replicas: int) -> None:
    """Gives the only worker other replicas."""
    devices = tuple(uo.Device("cpu", i) for i in range(num_replicas))
    communicator = IdentityCommunicator()
    strategy._worker._relayout(devices, ReductionToOneDevice(), communicator, (num_replicas,))
