"""Operators that draw random numbers draw from the generators of the replica that calls them.

torch chooses the kernel of an operator by dispatch keys, some of which a thread switches on for
itself. One of these is not used by torch: it has no kernels there. The operators that draw get
kernels there, and the threads of replicas switch the key on. All other operators skip the key in
torch's own dispatcher, at no cost. Functions that are made of operators, such as `dropout`, need
nothing: wherever the operators inside them draw, in a backward pass too, they come here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import _HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS as SKIPPED
from torch._ops import _higher_order_ops as HIGHER_ORDER

from unisono.engines.generators import default_generator, exact, identity, install, of_this_thread
from unisono.torch_private import (
    OpOverload,
    dispatch_key,
    has_kernel,
    key_set,
    num_dispatch_modes,
    without_dispatch_keys,
)

_NAME = "TESTING_ONLY_GenericMode"
_KEY: Any = dispatch_key(_NAME)
_KEYS = key_set(_NAME)
_KEYS_BELOW = torch._C._dispatch_keyset_full_after(_KEY)
_FAKE = torch._C._TorchDispatchModeKey.FAKE

# The operators that draw, but for those that torch takes apart before it looks for a kernel.
_STEMS = """
    _cudnn_attention_forward _efficient_attention_forward _flash_attention_forward _fused_dropout
    _sample_dirichlet _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_flash_attention _scaled_dot_product_fused_attention_overrideable
    _standard_gamma bernoulli binomial cauchy exponential geometric log_normal multinomial
    native_dropout normal poisson rand randint randn random randperm rrelu_with_noise uniform
"""
# Not every operator exists with every ending.
DRAWING = [stem + ending for stem in _STEMS.split() for ending in ("", "_", "_like", "_functional")]

# Held while a replica's generator stands in for the default generator of a device.
_default_locks: dict[torch.device, threading.Lock] = {}
# Kernels stay registered as long as these live.
_libraries: list[torch.library.Library] = []
_install_lock = threading.Lock()


class drawing:
    """Within the block, operators that draw do so from the generators of the current context.

    A class and not a generator, for the reason that `contexts.entered` gives.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        if not _libraries:
            with _install_lock:
                _install()
        self._before = self.is_on()
        self.turn(is_on=True)

    def __exit__(self, *error: object) -> None:
        self.turn(is_on=self._before)

    @staticmethod
    def is_on() -> bool:
        """Whether the current thread is within the block."""
        return bool(torch._C._dispatch_tls_is_dispatch_key_included(_KEY))

    @staticmethod
    def turn(*, is_on: bool) -> None:
        """Puts the current thread into the block, or out of it."""
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, is_on)


def _install() -> None:
    if _libraries:
        return
    install()
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _NAME)
    # Operators that call functions, such as `torch.cond`, are not in that dispatcher.
    SKIPPED.append(_KEY)
    for higher_order in HIGHER_ORDER.values():
        higher_order.fallthrough(_KEY)
    drawn = torch.library.Library("aten", "IMPL", _NAME)
    for name in DRAWING:
        for operator in overloads(name):
            names = [argument.name for argument in operator._schema.arguments]
            if "generator" in names:
                drawn.impl(operator, _given_own(operator, names.index("generator")))
            else:
                drawn.impl(operator, _as_default(operator), with_keyset=True)
    _libraries.extend([others, drawn])


def overloads(name: str) -> list[OpOverload]:
    """Returns the overloads of an operator that torch does not take apart at once."""
    packet = getattr(torch.ops.aten, name, None)
    found = [] if packet is None else [getattr(packet, one) for one in packet.overloads()]
    return [one for one in found if not has_kernel(one.name(), "CompositeImplicitAutograd")]


def _is_traced() -> bool:
    """Whether a compiler runs the operators without data, to note them. It must not note ours."""
    return torch._C._get_dispatch_mode(_FAKE) is not None


def _given_own(operator: OpOverload, place: int) -> Callable[..., Any]:
    """Returns the kernel of an operator with a `generator`: it fills in the replica's."""

    def draw(*args: Any, **kwargs: Any) -> Any:
        own = of_this_thread()
        with without_dispatch_keys(_KEYS):
            device = _device(args, kwargs)
            if own is None or device.type == "meta" or _is_traced():
                return operator(*args, **kwargs)
            given = kwargs.pop("generator", None)
            if len(args) > place:
                args, given = args[:place], args[place]
            if given is None or identity(given) == identity(default_generator(given.device)):
                return operator(*args, generator=own.on(device), **kwargs)
            return own.draw(given, lambda copy: operator(*args, generator=copy, **kwargs))

    return draw


def _as_default(operator: OpOverload) -> Callable[..., Any]:
    """Returns the kernel of an operator that draws from the default generator alone."""

    def draw(keys: Any, *args: Any, **kwargs: Any) -> Any:
        own = of_this_thread()
        device = _device(args, kwargs)
        is_elsewhere = own is None or device.type == "meta" or _is_traced()
        # Without a mode that comes before them, the operators that it calls come here again.
        if is_elsewhere or (device.type != "cuda" and not num_dispatch_modes()):
            return operator.redispatch(keys & _KEYS_BELOW, *args, **kwargs)
        with without_dispatch_keys(_KEYS), _standing_in(own, device):
            return operator(*args, **kwargs)

    return draw


@contextmanager
def _standing_in(own: Any, device: torch.device) -> Iterator[None]:
    """Within the block, the default generator of a device draws what the replica's would draw."""
    generator, default = own.on(device), default_generator(device)
    is_on_gpu = device.type == "cuda"
    with _default_locks.setdefault(device, threading.Lock()):
        kept: Any = default.graphsafe_get_state() if is_on_gpu else default.get_state()
        if is_on_gpu:
            # It takes over the state itself, also while a CUDA graph is captured.
            default.graphsafe_set_state(generator)
        else:
            default.set_state(generator.get_state())
        try:
            yield
        finally:
            if is_on_gpu:
                default.graphsafe_set_state(kept)
            else:
                generator.set_state(default.get_state())
                default.set_state(kept)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    tensor = next(tensors, None)
    return exact(kwargs.get("device") or "cpu") if tensor is None else tensor.device
