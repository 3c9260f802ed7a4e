"""What torch has once for all threads of a process, and replicas must not share.

Switches    A replica that sets one, or enters a block that does, switches for the others, too. What
            it sets back later may be what another one has set. So nobody would know which kernels a
            replica uses, also after the run. Several replicas may set none.
Caches      A thread that leaves a block of `torch.autocast`, or `parametrize.cached`, empties the
            cache for all threads. So how often a weight is cast, and with it how its gradients are
            rounded, would depend on when others leave theirs. Replicas use no cache.
Forward     Forward-mode differentiation has one level, which would lose the tangents of other
mode        replicas when one of them leaves it. Replicas take turns in it.
Operators   torch makes the Python object of an operator when it is first needed. If two threads
            need it at the same time, torch makes two, and Python keeps the second. C++ may keep the
            address of the first, which Python frees. Modes for operators then get whatever comes to
            lie there, or the process crashes. So only one thread at a time makes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch._guards import CompileContext
from torch._ops import OpOverloadPacket, _OpNamespace
from torch.autograd import forward_ad
from torch.backends import cuda, cudnn, mha, mkldnn, nnpack, opt_einsum
from torch.fx import _symbolic_trace
from torch.nn import attention
from torch.nn.utils import parametrize

from unisono.contexts import ReplicaContext, current_replica
from unisono.errors import UnsupportedError
from unisono.sharing import computed_once, in_place_of
from unisono.system import lock_across_forks
from unisono.torch_private import bindings

# Those whose devices a switch changes.
_CPU, _CUDA, _EVERYWHERE = frozenset({"cpu"}), frozenset({"cuda"}), frozenset({"cpu", "cuda"})
set_cache_enabled: Any = torch.set_autocast_cache_enabled
_operators_lock = lock_across_forks()


@computed_once
def keep_replicas_apart() -> None:
    """From now on, replicas cannot disturb each other through what torch has once."""
    _refuse_switches()
    _use_no_caches()
    _take_turns(forward_ad, "enter_dual_level", "exit_dual_level")
    # `torch.func.jvp`, and all that is made of it.
    _take_turns(eager_transforms, "enter_jvp_nesting", "exit_jvp_nesting")
    for owner in (_OpNamespace, OpOverloadPacket):
        _make_once(owner)


def _refuse_switches() -> None:
    _refuse_block(attention, "_sdpa_kernel", "torch.nn.attention.sdpa_kernel", _EVERYWHERE)
    _refuse_block(cudnn, "flags", "torch.backends.cudnn.flags", _CUDA)
    _refuse_block(mkldnn, "flags", "torch.backends.mkldnn.flags", _CPU)
    _refuse_block(nnpack, "flags", "torch.backends.nnpack.flags", _CPU)
    _refuse_block(opt_einsum, "flags", "torch.backends.opt_einsum.flags", _EVERYWHERE)
    # It patches `nn.Module`, and leaves that so if two do it at the same time.
    _refuse_block(_symbolic_trace, "_new_patcher", "torch.fx.Tracer.trace", _EVERYWHERE)
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
    name = "_set_check_sparse_tensor_invariants"
    shown = "torch.sparse.check_sparse_tensor_invariants"
    _refuse_change(bindings, name, shown, torch._C._check_sparse_tensor_invariants)
    for kind in ("flash", "mem_efficient", "math", "cudnn"):
        name, is_enabled = f"enable_{kind}_sdp", getattr(cuda, f"{kind}_sdp_enabled")
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


def _is_among_others() -> bool:
    context = current_replica()
    return context is not None and context.num_replicas_in_sync > 1


def _use_no_caches() -> None:
    cached: Any = parametrize.cached

    @in_place_of(torch, "set_autocast_cache_enabled")
    def set_outside_replicas(enabled: bool) -> None:  # noqa: FBT001
        set_cache_enabled(enabled and not _is_among_others())

    @in_place_of(parametrize, "cached")
    def cached_outside_replicas() -> Any:
        return nullcontext() if _is_among_others() else cached()


@contextmanager
def without_shared_caches() -> Iterator[None]:
    """Within the block, a replica computes again what another thread may take out of a cache."""
    was_enabled = torch.is_autocast_cache_enabled()
    set_cache_enabled(False)
    try:
        yield
    finally:
        set_cache_enabled(was_enabled)


def _take_turns(module: Any, enter_name: str, exit_name: str) -> None:
    """Lets a replica enter a level of forward mode when no other is in one."""
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


def _make_once(owner: Any) -> None:
    make = owner.__getattr__

    @in_place_of(owner, "__getattr__")
    def made_once(holder: Any, name: str) -> Any:
        with _operators_lock:
            # Another thread may have made it meanwhile.
            found = vars(holder).get(name)
            return make(holder, name) if found is None else found
