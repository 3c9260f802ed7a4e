"""Blocks that switch for all threads are refused in the steps of several replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import unisono as uo
from unisono.errors import UnsupportedError

BLOCKS = [
    lambda: sdpa_kernel(SDPBackend.MATH),
    lambda: torch.backends.cudnn.flags(enabled=False),
    lambda: torch.backends.mkldnn.flags(enabled=False, allow_tf32=None),
]
Block = Callable[[], AbstractContextManager[object]]


def switches() -> str:
    cuda = torch.backends.cuda
    attention = cuda.math_sdp_enabled(), cuda.flash_sdp_enabled()
    return f"{attention} {torch.backends.cudnn.enabled} {torch.backends.mkldnn.enabled}"


def step(block: Block) -> str:
    with block():
        return switches()


@pytest.mark.parametrize("block", BLOCKS)
def test_a_step_of_several_replicas_may_not_switch(block: Block) -> None:
    before = switches()
    strategy = uo.MirroredStrategy(["cpu:0", "cpu:1"])

    with pytest.raises(UnsupportedError, match=r"all 2 replicas.*around `strategy\.run`"):
        strategy.run(functools.partial(step, block))

    assert switches() == before
    with block():
        inside = switches()
        assert strategy.experimental_local_results(strategy.run(switches)) == (inside, inside)
    assert inside != before
    strategy.close()


@pytest.mark.parametrize("block", BLOCKS)
def test_a_single_replica_may(block: Block) -> None:
    strategy = uo.MirroredStrategy(["cpu:0"])
    with block():
        inside = switches()

    assert strategy.run(functools.partial(step, block)) == inside
    strategy.close()
