"""What torch functions mean on a replica: its own parameters, and its own random numbers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from unisono.engines.generators import ReplicaGenerators, RunGenerators, current, exact, install
from unisono.engines.random_functions import (
    DROPOUT,
    RANDOM,
    WITH_GENERATOR,
    draws_from_default,
)

# Held while a replica's state stands in for that of the default generator.
_default_lock = threading.Lock()

_NOTHING: Mapping[int, Tensor] = {}


class _Active(threading.local):
    mode: ReplicaMode | None = None


# The mode of the replica that this thread runs, also while it is off.
_active = _Active()


@functools.cache
def _install() -> None:
    install()
    torch.random.fork_rng = _wrap_fork(torch.random.fork_rng)


def _wrap_fork(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    @contextmanager
    def fork_rng(*args: Any, **kwargs: Any) -> Iterator[None]:
        mode = _active.mode
        with original(*args, **kwargs):
            if mode is None or mode in _get_current_function_mode_stack():
                yield
            else:
                # In a backward pass, where no mode is on: a checkpoint draws its numbers again.
                with mode:
                    yield

    return fork_rng


class ReplicaMode(TorchFunctionMode):
    """Within the block torch functions work for one replica.

    Args:
        of_run: The random generators of the run.
        replica_id: The replica, among those of all workers.
        stand_ins: By the identity of parameters, what the replica has in their place.
        after_backward: What to do after every `backward()`.
    """

    def __init__(
        self,
        of_run: RunGenerators,
        replica_id: int,
        stand_ins: Mapping[int, Tensor] = _NOTHING,
        after_backward: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._stand_ins = stand_ins
        self._after_backward = after_backward
        self._of_run = of_run
        self._replica_id = replica_id
        self._generators = ReplicaGenerators(of_run, replica_id)
        self._depth = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Passes everything on, with the replica's own parameters and generators."""
        kwargs = kwargs or {}
        for arg in args:
            if type(arg) is Parameter and id(arg) in self._stand_ins:
                args = tuple(self._stand_ins.get(id(one), one) for one in args)
                break
        if func not in RANDOM:
            result = func(*args, **kwargs)
            if func is Tensor.backward:
                self._after_backward()
            return result
        if func in DROPOUT:
            return self._dropout(*args, **kwargs)
        if func in WITH_GENERATOR:
            return self._draw(func, args, kwargs)
        if draws_from_default(func, args, kwargs):
            return self._as_default(func, args, kwargs)
        return func(*args, **kwargs)

    def __enter__(self) -> Any:
        _install()
        self._depth += 1
        _active.mode, current.generators = self, self._generators
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if not self._depth:
            _active.mode = current.generators = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _draw(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function that can be given a generator with the replica's own one."""
        if args and isinstance(args[-1], torch.Generator):
            # By position it is always the last one.
            args, kwargs = args[:-1], {**kwargs, "generator": args[-1]}
        given = kwargs.get("generator")
        if given is not None and given is not _default_generator(given.device):
            return self._of_run.draw(
                given,
                self._replica_id,
                lambda own: func(*args, **{**kwargs, "generator": own}),
            )
        device = _device(args, kwargs) if given is None else given.device
        return func(*args, **{**kwargs, "generator": self._generators.on(device)})

    def _dropout(
        self,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,  # noqa: FBT001, FBT002 - the signature of torch
        inplace: bool = False,  # noqa: FBT001, FBT002
        *,
        train: bool = True,
    ) -> Tensor:
        # What `functional.dropout` calls `training` is `train` for `torch.dropout`.
        training = training and train
        if not training or p in (0, 1) or not 0 < p < 1:
            return functional.dropout(input, p, training, inplace)
        own = self._generators.on(input.device)
        keep = torch.empty_like(input).bernoulli_(1 - p, generator=own)
        keep.div_(1 - p)
        return input.mul_(keep) if inplace else input * keep

    def _as_default(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        device = _device(args, kwargs)
        own = self._generators.on(device)
        default = _default_generator(device)
        with _default_lock:
            kept = default.get_state()
            default.set_state(own.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                own.set_state(default.get_state())
                default.set_state(kept)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    given = kwargs.get("device")
    if given is not None:
        device = torch.device(given)
    else:
        tensor = next((value for value in args if isinstance(value, Tensor)), None)
        device = torch.get_default_device() if tensor is None else tensor.device
    return exact(device)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator
