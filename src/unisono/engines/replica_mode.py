"""What torch functions mean on a replica: its own parameters, and its own random numbers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

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
from unisono.sharing import computed_once

_SPECIAL = RANDOM | {Tensor.backward, functional.batch_norm}

# Held while a replica's state stands in for that of the default generator.
_default_lock = threading.Lock()

_NOTHING: Mapping[int, Tensor] = {}


class _Active(threading.local):
    mode: ReplicaMode | None = None


# The mode of the replica that this thread runs, also while it is off.
_active = _Active()


@computed_once
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


class Watch(Protocol):
    """Watches what a replica uses that is not its own."""

    def after_use(self, parameter: Tensor, result: Any) -> None:
        """A parameter was used that is not the replica's own."""

    def before_backward(self, root: Tensor) -> None:
        """A backward pass will begin."""

    def before_write(self, running: Tensor) -> None:
        """Batch normalisation will write to a running mean."""


class ReplicaMode(TorchFunctionMode):
    """Within the block torch functions work for one replica.

    Args:
        of_run: The random generators of the run.
        replica_id: The replica, among those of all workers.
        stand_ins: By the identity of parameters, what the replica has in their place; its own
            parameters stand for themselves.
        after_backward: What to do after every `backward()`.
        watch: Is told of the use of parameters that are not in `stand_ins`, of every `backward()`
            to come, and of running statistics that will be written to.
        batch_norm: What takes the place of `functional.batch_norm`; None leaves it alone.
    """

    def __init__(
        self,
        of_run: RunGenerators,
        replica_id: int,
        stand_ins: Mapping[int, Tensor] = _NOTHING,
        after_backward: Callable[[], None] = lambda: None,
        watch: Watch | None = None,
        batch_norm: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._stand_ins = stand_ins
        self._after_backward = after_backward
        self._watch = watch
        self._batch_norm = batch_norm
        # What the mode works with while the replica acts for all; see `turn`.
        self._for_all: ReplicaMode | None = None
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
        stand_ins = self._stand_ins
        for arg in args:
            if type(arg) is Parameter and stand_ins.get(id(arg)) is not arg:
                return self._call_for_replica(func, args, kwargs or {})
        if kwargs:
            # torch passes the weights of some layers on by name.
            for arg in kwargs.values():
                if type(arg) is Parameter and stand_ins.get(id(arg)) is not arg:
                    return self._call_for_replica(func, args, kwargs)
        return self._call(func, args, kwargs or {})

    def _call_for_replica(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a function that was given parameters other than the replica's own."""
        stand_ins = self._stand_ins
        own_args = tuple(stand_ins.get(id(arg), arg) for arg in args)
        own_kwargs = {name: stand_ins.get(id(arg), arg) for name, arg in kwargs.items()}
        result = self._call(func, own_args, own_kwargs)
        for arg in (*own_args, *own_kwargs.values()):
            if self._watch is not None and type(arg) is Parameter and id(arg) not in stand_ins:
                self._watch.after_use(arg, result)
        return result

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func not in _SPECIAL:
            return func(*args, **kwargs)
        if func is Tensor.backward:
            if self._watch is not None:
                self._watch.before_backward(args[0])
            func(*args, **kwargs)
            return self._after_backward()
        if func is functional.batch_norm:
            if self._watch is not None and kwargs.get("training") and args[1] is not None:
                self._watch.before_write(args[1])
            return (self._batch_norm or func)(*args, **kwargs)
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

    def turn(self) -> None:
        """Changes from working for the replica to working for all of them, or back.

        While it works for all, parameters stand for themselves, and random numbers come from a
        generator that is the same on all workers.
        """
        other = self._for_all = self._for_all or ReplicaMode(self._of_run, -1)
        names = ("_stand_ins", "_after_backward", "_batch_norm", "_generators", "_replica_id")
        for name in names:
            own = getattr(self, name)
            setattr(self, name, getattr(other, name))
            setattr(other, name, own)
        if _active.mode is self:
            current.generators = self._generators

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
        if device.type == "cuda":
            # The state itself changes hands, also while a CUDA graph is captured.
            with _default_lock:
                given = default.graphsafe_get_state()
                default.graphsafe_set_state(own.graphsafe_get_state())
                try:
                    return func(*args, **kwargs)
                finally:
                    default.graphsafe_set_state(given)
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
