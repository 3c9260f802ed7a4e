"""The random generators of replicas.

torch has one default generator per device for all threads of a process, so replicas that drew from
it at the same time would get other numbers in every run. Each replica has its own default generator
instead. It is seeded at the start of every run from the caller's: different from replica to
replica, the same in every run of a program that sets `torch.manual_seed`, and restored by
`torch.set_rng_state`. On a replica, torch's functions for seeds and states mean that generator.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from unisono.contexts.current import stack
from unisono.errors import ContextError

T = TypeVar("T")

_CPU = torch.device("cpu")
# Any odd number with well mixed bits keeps the seeds of replicas far apart.
_STEP = 0x9E3779B97F4A7C15


class _Seed(threading.local):
    def __init__(self) -> None:
        with torch.inference_mode(mode=False):
            self.value = torch.empty((), dtype=torch.int64, device="cpu")


# Kept, because to make a tensor takes longer than to draw a number.
_seed = _Seed()


@dataclass
class _Given:
    """A generator that was given to a random function in a run.

    The first replica that uses it draws from it. If it was made outside the step, others come, too:
    each of them gets a copy that starts where the first one did.
    """

    generator: torch.Generator
    before: Tensor
    owner: int
    last: Tensor
    copies: dict[int, torch.Generator] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> None:
        """Raises if a method has changed a generator that several replicas use."""
        if not torch.equal(self.generator.get_state(), self.last):
            raise ContextError(
                "A `torch.Generator` that was made outside `run` is used by several replicas, and "
                "a step called its `manual_seed()`, `seed()` or `set_state()`. All replicas share "
                "the generator, so the call would change the random numbers of the others. Seed it "
                "before `run`, or call `torch.manual_seed()` in the step, which seeds each replica "
                "separately."
            )


class RunGenerators:
    """The generators of one run: its seed, and what random functions were given in it."""

    def __init__(self) -> None:
        # From the generator of the caller, which so goes on from run to run.
        self.seed = int(_seed.value.random_())
        self._given: dict[int, _Given] = {}
        self._lock = threading.Lock()

    def draw(self, given: torch.Generator, replica: int, fn: Callable[[torch.Generator], T]) -> T:
        """Calls `fn` with what a replica draws from where it was given a generator."""
        with self._lock:
            entry = self._given.get(identity(given))
            if entry is None:
                before = given.get_state()
                entry = self._given[identity(given)] = _Given(given, before, replica, before)
        if replica != entry.owner:
            return fn(self._copy(entry, replica))
        with entry.lock:
            if entry.copies:
                entry.check()
            result = fn(given)
            entry.last = given.get_state()
            return result

    @staticmethod
    def _copy(entry: _Given, replica: int) -> torch.Generator:
        with entry.lock:
            if replica not in entry.copies:
                entry.check()
                copy = torch.Generator(entry.generator.device)
                copy.set_state(entry.before)
                entry.copies[replica] = copy
            return entry.copies[replica]

    def undo(self) -> None:
        """Sets the generators back that were given to random functions in the run."""
        for entry in self._given.values():
            entry.generator.set_state(entry.before)

    def settle(self) -> None:
        """After the run: generators that several replicas have used go on as the first one's."""
        for entry in self._given.values():
            if entry.copies:
                entry.check()
                first = min(entry.owner, *entry.copies)
                if first != entry.owner:
                    entry.generator.set_state(entry.copies[first].get_state())


class ReplicaGenerators:
    """The default generators of one replica, one per device.

    They are the same objects in all runs of a strategy, so a captured CUDA graph can register them.
    """

    def __init__(self, replica_id: int, for_all: ReplicaGenerators | None = None) -> None:
        self.for_all = for_all
        self._replica_id = replica_id
        self._by_device: dict[torch.device, torch.Generator] = {}
        # Those of them that were seeded in this run.
        self._seeded: set[torch.device] = set()

    def begin(self, of_run: RunGenerators) -> None:
        """Before a run: from now on, it draws other numbers."""
        self._of_run = of_run
        self._seed = self._seed_of_gpus = (of_run.seed + self._replica_id * _STEP) % 2**63
        self._seeded.clear()

    def on(self, device: torch.device) -> torch.Generator:
        """Returns the default generator for a device."""
        if device not in self._seeded:
            seed = self._seed if device.type == "cpu" else self._seed_of_gpus
            self.unseeded(device).manual_seed(seed)
            self._seeded.add(device)
        return self._by_device[device]

    def unseeded(self, device: torch.device) -> torch.Generator:
        """Returns that generator, which may have no seed of this run yet."""
        if device not in self._by_device:
            self._by_device[device] = torch.Generator(device)
        return self._by_device[device]

    @property
    def has_drawn_on_host(self) -> bool:
        """Whether the replica has drawn from the generator of the CPU in this run."""
        return _CPU in self._seeded

    def draw(self, given: torch.Generator, fn: Callable[[torch.Generator], T]) -> T:
        """Calls `fn` with what the replica draws from where it was given a generator."""
        return self._of_run.draw(given, self._replica_id, fn)

    def seed_gpus(self, seed: int) -> None:
        """Seeds the generators of all GPUs, also of those that it has not drawn on yet."""
        self._seed_of_gpus = int(seed)
        self._seeded &= {_CPU}


def of_this_thread() -> ReplicaGenerators | None:
    """Returns what this thread draws from, if it runs a replica or for all of them."""
    for context in reversed(stack.entered):
        if context.generators is not None:
            return cast(ReplicaGenerators, context.generators)
    return None


def identity(generator: Any) -> int:
    """Returns what only one generator has, for which there may be two objects of Python."""
    return int(generator._cdata)


def default_generator(device: torch.device) -> torch.Generator:
    """Returns torch's default generator for a device."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator


class _DefaultGenerator:
    """Stands for torch's default generator in the functions of `torch.random`."""

    def __getattr__(self, name: str) -> Any:
        own = of_this_thread()
        return getattr(torch.default_generator if own is None else own.on(_CPU), name)


def install() -> None:
    """Makes torch's functions for seeds and states mean a replica's generator on a replica.

    Activation checkpointing depends on it: it sets the state back to draw the same numbers again.
    """
    # `torch.manual_seed`, `torch.get_rng_state` and their like look it up there at every call, so
    # also a program that has imported one of them by name calls the replica's.
    vars(torch.random)["default_generator"] = _DefaultGenerator()
    for name, of_replica in _ON_GPUS.items():
        redirected = _redirected(getattr(torch.cuda.random, name), of_replica)
        for module in (torch.cuda, torch.cuda.random):
            setattr(module, name, redirected)


def _redirected(original: Callable[..., Any], of_replica: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        own = of_this_thread()
        return original(*args, **kwargs) if own is None else of_replica(own, *args, **kwargs)

    return redirected


def exact(device: Any) -> torch.device:
    """Returns a device with its index, as a GPU without one is the current one."""
    read = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if read.type == "cuda" and read.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return read


def _seed_current(own: ReplicaGenerators, seed: int) -> None:
    own.on(exact("cuda")).manual_seed(int(seed))


# What each function of `torch.cuda.random` does on a replica. Those for all GPUs that are not here
# call these.
_ON_GPUS: dict[str, Callable[..., Any]] = {
    "get_rng_state": lambda own, device="cuda": own.on(exact(device)).get_state(),
    "set_rng_state": lambda own, new_state, device="cuda": own.on(exact(device)).set_state(
        new_state
    ),
    "manual_seed": _seed_current,
    "manual_seed_all": ReplicaGenerators.seed_gpus,
    "seed": lambda own: _seed_current(own, torch.Generator().seed()),
    "seed_all": lambda own: own.seed_gpus(torch.Generator().seed()),
    "initial_seed": lambda own: own.on(exact("cuda")).initial_seed(),
}
