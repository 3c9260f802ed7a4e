"""Switches of torch that all threads share.

A replica that sets one, or enters a block that does, switches for the others, too. What it sets
back later may be what another one has set. So nobody would know which kernels a replica uses, also
after the run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch._guards import CompileContext
from torch.backends import cuda, cudnn, mha, mkldnn, nnpack, opt_einsum
from torch.fx import _symbolic_trace
from torch.nn import attention

from unisono.contexts import ReplicaContext, current_replica
from unisono.errors import UnsupportedError
from unisono.sharing import computed_once, in_place_of
from unisono.torch_private import bindings

_EVERYWHERE = frozenset({"cpu", "cuda"})


@computed_once
def refuse_switches() -> None:
    """From now on, several replicas of one process may not set what holds for all of them."""
    _refuse_block(attention, "_sdpa_kernel", "torch.nn.attention.sdpa_kernel", _EVERYWHERE)
    _refuse_block(cudnn, "flags", "torch.backends.cudnn.flags", frozenset({"cuda"}))
    _refuse_block(mkldnn, "flags", "torch.backends.mkldnn.flags", frozenset({"cpu"}))
    _refuse_block(nnpack, "flags", "torch.backends.nnpack.flags", frozenset({"cpu"}))
    _refuse_block(opt_einsum, "flags", "torch.backends.opt_einsum.flags", _EVERYWHERE)
    # Two at the same time crash the process.
    _refuse_block(torch.profiler.profile, "start", "torch.profiler.profile", _EVERYWHERE)
    own = torch.autograd.profiler.profile
    _refuse_block(own, "__enter__", "torch.autograd.profiler.profile", _EVERYWHERE)
    # It patches `nn.Module`, and leaves that so if two do it at the same time.
    _refuse_block(_symbolic_trace, "_new_patcher", "torch.fx.Tracer.trace", _EVERYWHERE)
    for name in ("default_dtype", "float32_matmul_precision"):
        _refuse_change(torch, f"set_{name}", f"torch.set_{name}", getattr(torch, f"get_{name}"))
    _refuse_change(
        torch,
        "set_deterministic_debug_mode",
        "torch.set_deterministic_debug_mode",
        torch.get_deterministic_debug_mode,
        lambda mode: {"default": 0, "warn": 1, "error": 2}.get(mode, mode),
    )
    _refuse_change(
        torch,
        "use_deterministic_algorithms",
        "torch.use_deterministic_algorithms",
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda mode, *, warn_only=False: (mode, warn_only),
    )
    _refuse_change(
        torch,
        "set_anomaly_enabled",
        "torch.autograd.set_detect_anomaly",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda mode, check_nan=True: (mode, check_nan),
    )
    _refuse_change(
        bindings,
        "_set_check_sparse_tensor_invariants",
        "torch.sparse.check_sparse_tensor_invariants",
        torch._C._check_sparse_tensor_invariants,
    )
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        name = f"enable_{kind}_sdp"
        is_enabled = getattr(cuda, f"{kind}_sdp_enabled")
        _refuse_change(cuda, name, f"torch.backends.cuda.{name}", is_enabled)
    name = "set_fastpath_enabled"
    _refuse_change(mha, name, f"torch.backends.mha.{name}", mha.get_fastpath_enabled)


def _one_of_several() -> ReplicaContext | None:
    context = current_replica()
    if context is None or context.num_local_replicas == 1:
        return None
    # torch's compiler switches for itself. Replicas run one after another while it may be called.
    return None if CompileContext.current_compile_id() is not None else context


def _refuse_block(owner: Any, name: str, shown: str, affected: frozenset[str]) -> None:
    """Refuses a block that changes what devices of the `affected` types do."""
    original = getattr(owner, name)

    @in_place_of(owner, name)
    def checked(*args: Any, **kwargs: Any) -> Any:
        context = _one_of_several()
        if context is None:
            return original(*args, **kwargs)
        if affected.isdisjoint(place.type for place in context.replicas.mirrors.places):
            return nullcontext()
        raise _error(context, shown)


def _refuse_change(
    owner: Any,
    name: str,
    shown: str,
    now: Callable[[], Any],
    wanted: Callable[..., Any] = lambda value: value,
) -> None:
    """Refuses a call that sets something to another value than it has `now`."""
    original = getattr(owner, name)

    @in_place_of(owner, name)
    def checked(*args: Any, **kwargs: Any) -> Any:
        context = _one_of_several()
        if context is not None and wanted(*args, **kwargs) != now():
            raise _error(context, shown)
        return original(*args, **kwargs)


def _error(context: ReplicaContext, shown: str) -> UnsupportedError:
    return UnsupportedError(
        f"The step calls `{shown}()`, which switches for all threads of this process, and so for "
        f"all {context.num_local_replicas} replicas in it. Enter such a block around "
        "`strategy.run`, make such a setting before it, or start one process per replica (`unisono "
        "launch -n N SCRIPT`)."
    )
