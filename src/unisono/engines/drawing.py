"""Operators that draw random numbers draw from the generators of the replica that calls them.

torch chooses the kernel of an operator by dispatch keys, some of which a thread switches on for
itself. One of these is not used by torch: it has no kernels there. The operators that draw get
kernels there, and the threads of replicas switch the key on. All other operators skip the key in
torch's own dispatcher, at no cost. Functions that are made of operators, such as `dropout`, need
nothing: wherever the operators inside them draw, in a backward pass too, they come here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unisono.engines.generators import default_generator, identity, install, of_this_thread

_NAME = "TESTING_ONLY_GenericMode"
_KEY: Any = torch._C._parse_dispatch_key(_NAME)
_KEYS = torch._C.DispatchKeySet(_KEY)
_KEYS_BELOW = torch._C._dispatch_keyset_full_after(_KEY)
_FAKE = torch._C._TorchDispatchModeKey.FAKE

# Operators with kernels that draw. They take a `generator` argument.
WITH_GENERATOR = (
    "_fused_dropout",
    "_sample_dirichlet",
    "_standard_gamma",
    "bernoulli",
    "bernoulli_",
    "binomial",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "multinomial",
    "normal",
    "normal_",
    "poisson",
    "random_",
    "randperm",
    "rrelu_with_noise",
    "rrelu_with_noise_",
    "uniform_",
)
# Operators whose kernels for GPUs draw from the default generator, and can be told no other.
WITHOUT_GENERATOR = (
    "_cudnn_attention_forward",
    "_efficient_attention_forward",
    "_flash_attention_forward",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "native_dropout",
)

# Held while a replica's generator stands in for the default generator of a GPU.
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
        self._before = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, True)  # noqa: FBT003

    def __exit__(self, *error: object) -> None:
        torch._C._dispatch_tls_set_dispatch_key_included(_KEY, self._before)


def _install() -> None:
    if _libraries:
        return
    install()
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _NAME)
    drawn = torch.library.Library("aten", "IMPL", _NAME)
    for name in WITH_GENERATOR:
        for operator in _overloads(name):
            names = [argument.name for argument in operator._schema.arguments]
            if "generator" in names:
                drawn.impl(operator, _given_own(operator, names.index("generator")))
    if torch.cuda.is_available():
        for name in WITHOUT_GENERATOR:
            for operator in _overloads(name):
                drawn.impl(operator, _as_default(operator), with_keyset=True)
    _libraries.extend([others, drawn])


def _overloads(name: str) -> list[torch._ops.OpOverload]:
    """Returns the overloads of an operator that are not made of other operators."""
    packet = getattr(torch.ops.aten, name, None)
    found = [] if packet is None else [getattr(packet, one) for one in packet.overloads()]
    return [one for one in found if not is_composite(one)]


def is_composite(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator calls others on every device."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = "CompositeImplicitAutograd", "CompositeExplicitAutograd"
    return any(has(operator.name(), key) for key in keys)


def _is_traced() -> bool:
    """Whether a compiler runs the operators without data, to note them. It must not note ours."""
    return torch._C._get_dispatch_mode(_FAKE) is not None


def _given_own(operator: torch._ops.OpOverload, place: int) -> Callable[..., Any]:
    """Returns the kernel of an operator with a `generator`: it fills in the replica's."""

    def draw(*args: Any, **kwargs: Any) -> Any:
        own = of_this_thread()
        with torch._C._ExcludeDispatchKeyGuard(_KEYS):
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


def _as_default(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    """Returns the kernel of an operator that draws from the default generator of a GPU.

    For the call, that generator takes over the state of the replica's one: not a copy of its
    values, so it also works while a CUDA graph is captured.
    """

    def draw(keys: Any, *args: Any, **kwargs: Any) -> Any:
        own = of_this_thread()
        device = _device(args, kwargs)
        if own is None or device.type != "cuda" or _is_traced():
            # On other devices the operator calls one that takes a generator.
            return operator.redispatch(keys & _KEYS_BELOW, *args, **kwargs)
        default = default_generator(device)
        lock = _default_locks.setdefault(device, threading.Lock())
        with torch._C._ExcludeDispatchKeyGuard(_KEYS), lock:
            kept = default.graphsafe_get_state()
            default.graphsafe_set_state(own.on(device))
            try:
                return operator(*args, **kwargs)
            finally:
                default.graphsafe_set_state(kept)

    return draw


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return next(tensors).device
