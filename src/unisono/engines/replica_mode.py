"""What torch functions mean on a replica: its own parameters, and its own random numbers.

torch has one generator for all threads of a process, so replicas that draw from it at the same time
get other numbers in every run. Here each replica has a generator of its own, seeded at the start of
every run from the caller's: different from replica to replica, the same in every run of a program
that sets `torch.manual_seed`, and restored by `torch.set_rng_state`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import Parameter, functional, init
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

# Take a `generator` argument.
_WITH_GENERATOR = frozenset(
    [
        torch._sample_dirichlet,
        torch._standard_gamma,
        torch.bernoulli,
        torch.binomial,
        torch.multinomial,
        torch.normal,
        torch.rand,
        torch.rand_like,
        torch.randint,
        torch.randint_like,
        torch.randn,
        torch.randn_like,
        torch.randperm,
        torch.poisson,
        Tensor.bernoulli,
        Tensor.bernoulli_,
        Tensor.cauchy_,
        Tensor.exponential_,
        Tensor.geometric_,
        Tensor.log_normal_,
        Tensor.multinomial,
        Tensor.normal_,
        Tensor.random_,
        Tensor.uniform_,
        init.kaiming_normal_,
        init.kaiming_uniform_,
        init.normal_,
        init.orthogonal_,
        init.sparse_,
        init.trunc_normal_,
        init.uniform_,
        init.xavier_normal_,
        init.xavier_uniform_,
    ]
)
# Draw from the default generator without a way to name another. Each with the arguments without
# which it draws nothing: their names, places and defaults.
_P = ("p", 1, 0.5)
_TRAINING = ("training", 2, True)
_WITHOUT_GENERATOR: dict[Callable[..., Any], tuple[tuple[str, int, Any], ...]] = {
    functional.alpha_dropout: (_P, ("training", 2, False)),
    functional.dropout1d: (_P, _TRAINING),
    functional.dropout2d: (_P, _TRAINING),
    functional.dropout3d: (_P, _TRAINING),
    functional.feature_alpha_dropout: (_P, ("training", 2, False)),
    functional.fractional_max_pool2d: (),
    functional.fractional_max_pool3d: (),
    functional.gumbel_softmax: (),
    functional.multi_head_attention_forward: (("dropout_p", 10, 0.0), ("training", 13, True)),
    functional.rrelu: (("training", 3, False),),
    functional.scaled_dot_product_attention: (("dropout_p", 4, 0.0),),
    torch.alpha_dropout: (_P, ("train", 2, True)),
    torch.feature_alpha_dropout: (_P, ("train", 2, True)),
    torch.feature_dropout: (_P, ("train", 2, True)),
    torch.native_dropout: (_P, ("train", 2, True)),
    torch.rrelu: (("training", 3, False),),
}
_RECURRENT = frozenset([torch.gru, torch.lstm, torch.rnn_relu, torch.rnn_tanh])
_DROPOUT = frozenset([functional.dropout, torch.dropout])
_RANDOM = frozenset([*_WITH_GENERATOR, *_WITHOUT_GENERATOR, *_RECURRENT, *_DROPOUT])
_SPECIAL = _RANDOM | {Tensor.backward, functional.batch_norm}

# Held while a replica's state stands in for that of the default generator.
_default_lock = threading.Lock()


_NOTHING: Mapping[int, Tensor] = {}


class _Current(threading.local):
    randomness: ReplicaMode | None = None


class _Seed(threading.local):
    def __init__(self) -> None:
        with torch.inference_mode(mode=False):
            self.value = torch.empty((), dtype=torch.int64, device="cpu")


_current = _Current()
# Kept, because to make a tensor takes longer than to draw a number.
_seed = _Seed()


@functools.cache
def _install() -> None:
    """Makes torch's functions for the state speak of a replica's generator on a replica.

    Activation checkpointing depends on it: it sets the state back to draw the same numbers again.
    """
    for module in (torch, torch.random):
        _redirect(module, torch.random, lambda given: torch.device("cpu"))
    for module in (torch.cuda, torch.cuda.random):
        _redirect(module, torch.cuda.random, lambda given: _device((), {"device": given}))
    torch.random.fork_rng = _wrap_fork(torch.random.fork_rng)


def _wrap_fork(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    @contextmanager
    def fork_rng(*args: Any, **kwargs: Any) -> Iterator[None]:
        randomness = _current.randomness
        with original(*args, **kwargs):
            if randomness is None or randomness in _get_current_function_mode_stack():
                yield
            else:
                # In a backward pass, where no mode is on: a checkpoint draws its numbers again.
                with randomness:
                    yield

    return fork_rng


def _redirect(module: Any, original: Any, device_of: Callable[[Any], torch.device]) -> None:
    get_state, set_state = original.get_rng_state, original.set_rng_state

    @functools.wraps(get_state)
    def get_rng_state(device: Any = "cuda") -> Tensor:
        if _current.randomness is not None:
            return _current.randomness.get_state(device_of(device))
        return cast(Tensor, get_state() if module in (torch, torch.random) else get_state(device))

    @functools.wraps(set_state)
    def set_rng_state(new_state: Tensor, device: Any = "cuda") -> None:
        if _current.randomness is not None:
            _current.randomness.set_state(new_state, device_of(device))
        elif module in (torch, torch.random):
            set_state(new_state)
        else:
            set_state(new_state, device)

    module.get_rng_state, module.set_rng_state = get_rng_state, set_rng_state


def draw_seed() -> int:
    """Draws the seed of one run from the caller's generator."""
    return int(_seed.value.random_())


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
        seed: The seed of the run, for the replica's own random numbers.
        replica_id: The replica.
        stand_ins: By the identity of parameters, what the replica has in their place; its own
            parameters stand for themselves.
        after_backward: What to do after every `backward()`.
        watch: Is told of the use of parameters that are not in `stand_ins`, of every `backward()`
            to come, and of running statistics that will be written to.
        batch_norm: What takes the place of `functional.batch_norm`; None leaves it alone.
    """

    def __init__(
        self,
        seed: int,
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
        self._run_seed = seed
        # What the mode works with while the replica acts for all; see `turn`.
        self._for_all: ReplicaMode | None = None
        # Any odd number with well mixed bits keeps the seeds of replicas far apart.
        self._seed = (seed + replica_id * 0x9E3779B97F4A7C15) % 2**63
        self._generators: dict[torch.device, torch.Generator] = {}
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
        if func in _DROPOUT:
            return self._dropout(*args, **kwargs)
        if func in _WITH_GENERATOR and kwargs.get("generator") is None:
            return func(*args, **{**kwargs, "generator": self._generator(_device(args, kwargs))})
        if _draws_from_default(func, args, kwargs):
            return self._as_default(func, args, kwargs)
        return func(*args, **kwargs)

    def __enter__(self) -> Any:
        _install()
        self._depth += 1
        _current.randomness = self
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        _current.randomness = self if self._depth else None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def turn(self) -> None:
        """Changes from working for the replica to working for all of them, or back.

        While it works for all, parameters stand for themselves, and random numbers come from a
        generator that is the same on all workers.
        """
        other = self._for_all = self._for_all or ReplicaMode(self._run_seed, -1)
        for name in ("_stand_ins", "_after_backward", "_batch_norm", "_seed", "_generators"):
            own = getattr(self, name)
            setattr(self, name, getattr(other, name))
            setattr(other, name, own)

    def get_state(self, device: torch.device) -> Tensor:
        """Returns the state of this replica's generator."""
        return self._generator(device).get_state()

    def set_state(self, state: Tensor, device: torch.device) -> None:
        """Sets the state of this replica's generator."""
        self._generator(device).set_state(state)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]

    def _dropout(
        self,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,  # noqa: FBT001, FBT002 - the signature of torch
        inplace: bool = False,  # noqa: FBT001, FBT002
    ) -> Tensor:
        if not training or p in (0, 1) or not 0 < p < 1:
            return functional.dropout(input, p, training, inplace)
        keep = torch.empty_like(input).bernoulli_(1 - p, generator=self._generator(input.device))
        keep.div_(1 - p)
        return input.mul_(keep) if inplace else input * keep

    def _as_default(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        device = _device(args, kwargs)
        own = self._generator(device)
        default = _default_generator(device)
        with _default_lock:
            kept = default.get_state()
            default.set_state(own.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                own.set_state(default.get_state())
                default.set_state(kept)


def _draws_from_default(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    if func in _RECURRENT:
        # In both their signatures the dropout is the first float, and training comes after it.
        at = next((i for i, value in enumerate(args) if isinstance(value, float)), None)
        return at is not None and args[at] > 0 and bool(args[at + 1])
    if func not in _WITHOUT_GENERATOR:
        return False
    return all(
        kwargs.get(name, args[place] if place < len(args) else default)
        for name, place, default in _WITHOUT_GENERATOR[func]
    )


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    given = kwargs.get("device")
    if given is not None:
        device = torch.device(given)
    else:
        tensor = next((value for value in args if isinstance(value, Tensor)), None)
        device = torch.get_default_device() if tensor is None else tensor.device
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator
