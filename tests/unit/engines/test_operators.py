"""Several threads that ask for an operator first get the same object."""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch

from unisono.engines.process_wide import keep_replicas_apart

NUM_OPERATORS = 100
NUM_THREADS = 4


def test_all_threads_get_the_same_object_for_an_operator() -> None:
    keep_replicas_apart()
    names = [f"operator_{i}" for i in range(NUM_OPERATORS)]
    library = torch.library.Library("unisono_test", "DEF")
    for name in names:
        library.define(f"{name}(Tensor x) -> Tensor")
    found: list[list[Any]] = [[] for _ in range(NUM_THREADS)]
    together = threading.Barrier(NUM_THREADS)

    def ask(mine: list[Any]) -> None:
        for name in names:
            together.wait(60)
            packet = getattr(torch.ops.unisono_test, name)
            mine += [packet, packet.default]

    threads = [threading.Thread(target=ask, args=(mine,)) for mine in found]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)

    assert [len(mine) for mine in found] == [2 * NUM_OPERATORS] * NUM_THREADS
    assert all(len({id(one) for one in same}) == 1 for same in zip(*found, strict=True))
