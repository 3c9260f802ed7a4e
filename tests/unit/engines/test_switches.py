"""Blocks that switch for all threads are refused in the steps of several replicas."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import unisono as uo
from unisono.errors import UnsupportedError

BLOCKS = [
    lambda: sdpa_kernel(SDPBackend.MATH),
    lambda: torch.backends.mkldnn.flags(enabled=False, allow_tf32=None),
]
# What each sets, and two values of it.
CALLS: dict[str, tuple[Callable[[Any], object], Callable[[], object], Any, Any]] = {
    "set_default_dtype": (
        lambda value: torch.set_default_dtype(value),
        torch.get_default_dtype,
        *(torch.float32, torch.float64),
    ),
    "set_float32_matmul_precision": (
        lambda value: torch.set_float32_matmul_precision(value),
        torch.get_float32_matmul_precision,
        *("highest", "high"),
    ),
    "use_deterministic_algorithms": (
        lambda value: torch.use_deterministic_algorithms(value),
        torch.are_deterministic_algorithms_enabled,
        *(False, True),
    ),
    "set_deterministic_debug_mode": (
        lambda value: torch.set_deterministic_debug_mode(value),
        lambda: ("default", "warn")[torch.get_deterministic_debug_mode()],
        *("default", "warn"),
    ),
    "set_detect_anomaly": (
        lambda value: torch.autograd.set_detect_anomaly(value),
        torch.is_anomaly_enabled,
        *(False, True),
    ),
    "check_sparse_tensor_invariants": (
        lambda value: torch.sparse.check_sparse_tensor_invariants(enable=value).__enter__(),
        lambda: torch.sparse.check_sparse_tensor_invariants.is_enabled(),
        *(False, True),
    ),
    "enable_flash_sdp": (
        lambda value: torch.backends.cuda.enable_flash_sdp(value),
        torch.backends.cuda.flash_sdp_enabled,
        *(True, False),
    ),
    "set_fastpath_enabled": (
        lambda value: torch.backends.mha.set_fastpath_enabled(value),
        torch.backends.mha.get_fastpath_enabled,
        *(True, False),
    ),
}
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


@pytest.mark.parametrize("module", [torch.backends.nnpack, torch.backends.opt_einsum])
def test_other_blocks_are_refused(module: Any) -> None:
    strategy = uo.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(UnsupportedError, match=rf"{module.__name__}\.flags"):
        strategy.run(lambda: module.flags(enabled=False))
    strategy.close()


@pytest.mark.parametrize("module", [torch.profiler, torch.autograd.profiler])
def test_a_profiler_is_refused_in_a_step_and_not_around_run(
    module: Any, mirrored: Callable[..., uo.MirroredStrategy]
) -> None:
    strategy = mirrored(2)

    def profiled() -> None:
        with module.profile():
            torch.ones(1) + 1

    with pytest.raises(UnsupportedError, match=rf"{module.__name__}\.profile.*around"):
        strategy.run(profiled)
    with module.profile() as profiler:
        strategy.run(lambda: torch.ones(1) + 1)
    assert any(one.key == "aten::add" for one in profiler.key_averages())


def test_tracing_is_refused_before_it_patches_modules_for_all(
    mirrored: Callable[..., uo.MirroredStrategy],
) -> None:
    call = torch.nn.Module.__call__

    with pytest.raises(UnsupportedError, match=r"torch\.fx\.Tracer\.trace"):
        mirrored(2).run(lambda: torch.fx.symbolic_trace(torch.nn.ReLU()))

    assert torch.nn.Module.__call__ is call


def test_blocks_for_other_devices_do_nothing_in_a_step() -> None:
    """As in transformers, whose CTC losses switch cuDNN off."""
    strategy = uo.MirroredStrategy(["cpu:0", "cpu:1"])
    together = threading.Barrier(2)
    before = switches()

    def step() -> str:
        with torch.backends.cudnn.flags(enabled=False):
            together.wait(30)
            return switches()

    assert strategy.experimental_local_results(strategy.run(step)) == (before, before)
    assert switches() == before
    strategy.close()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_what_holds_for_all_threads_is_set_outside(name: str, num_replicas: int) -> None:
    set_it, now, first, second = CALLS[name]
    strategy = uo.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    before = now()
    set_it(first)
    try:
        strategy.run(lambda: set_it(first))
        if num_replicas == 1:
            strategy.run(lambda: set_it(second))
        else:
            with pytest.raises(UnsupportedError, match=rf"{name}\(\)`.*such a setting before"):
                strategy.run(lambda: set_it(second))
            assert now() == first
            strategy.run(lambda: uo.once(set_it, second))
        assert now() == second
    finally:
        set_it(before)
        strategy.close()
