"""A module once, and a clone of it for every replica.

The user's module stays the one that is read, saved and updated: the *primary*. Each replica has a
*clone* with the same attributes, whose parameters are *leaves* that share the primary's storage
(where they share its memory) but collect gradients of their own, and whose buffers are its own. In
a replica's thread the primary answers with the clone, so that no two threads ever touch the same
leaf or the same module.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unisono.errors import UnsupportedError
from unisono.kernels import reduce_batch
from unisono.options import ReduceOp
from unisono.variables.batch_norm import synchronized

MIRROR = "_unisono_mirror"


def raw(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes that a module itself has, whoever asks."""
    attributes: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return attributes


class _Stamp(NamedTuple):
    """A tensor as it was: another tensor in its place, or a write to it, can be seen."""

    tensor: Tensor | None
    version: int

    @classmethod
    def of(cls, tensor: Tensor | None) -> _Stamp:
        return cls(tensor, 0 if tensor is None else tensor._version)

    def fits(self, tensor: Tensor | None) -> bool:
        return self.tensor is tensor and (tensor is None or tensor._version == self.version)


@dataclass(eq=False)
class Mirror:
    """What a primary module knows of its clones."""

    owner: Mirrors
    replicas: list[nn.Module]
    # What the clones were last given of the primary's attributes and buffers, and the run after
    # which their own buffers were last read.
    given: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, list[_Stamp]] = field(default_factory=dict)
    runs_read: int = 0


class Leaves:
    """One parameter: the primary, and the leaf of each replica."""

    __slots__ = ("leaves", "memories", "primary")

    def __init__(
        self,
        primary: nn.Parameter,
        memories: tuple[Hashable, ...],
        places: tuple[torch.device, ...],
    ) -> None:
        self.primary = primary
        self.memories = memories
        self.leaves: list[nn.Parameter] = []
        storages: dict[Hashable, Tensor] = {memories[0]: primary.detach()}
        for memory, place in zip(memories, places, strict=True):
            if memory not in storages:
                storages[memory] = primary.detach().to(place, copy=True)
            leaf = nn.Parameter(storages[memory], requires_grad=primary.requires_grad)
            self.leaves.append(leaf)

    def is_current(self) -> bool:
        """Whether the leaves still are what the primary is: `p.data = ...` moves it away."""
        first = self.leaves[0]
        return (
            first.data_ptr() == self.primary.data_ptr()
            and first.requires_grad == self.primary.requires_grad
            and first.shape == self.primary.shape
        )

    def first_in_each_memory(self) -> Iterator[nn.Parameter]:
        """Yields one leaf for each memory that is not the primary's."""
        seen = {self.memories[0]}
        for memory, leaf in zip(self.memories, self.leaves, strict=True):
            if memory not in seen:
                seen.add(memory)
                yield leaf


class Mirrors:
    """The modules of one strategy and their clones."""

    def __init__(
        self,
        memories: tuple[Hashable, ...],
        places: tuple[torch.device, ...],
        *,
        synchronize_batch_norm: bool = False,
    ) -> None:
        self._synchronizes = synchronize_batch_norm
        self._memories = memories
        self._places = places
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._order: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._leaves: dict[int, Leaves] = {}
        self._num_adopted = 0
        self.is_stale = False
        self.num_runs = 0
        # Changes whenever there are other leaves than before.
        self.generation = 0

    def adopt(self, module: nn.Module) -> None:
        """Makes `module` a primary; its clones are made before the next run."""
        if MIRROR in raw(module):
            return
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{type(module).__name__} is a TorchScript module, which cannot be mirrored. Build "
                "the plain module in the scope, and script it after training."
            )
        self._num_adopted += 1
        self._order[module] = self._num_adopted
        self._modules.add(module)
        raw(module)[MIRROR] = Mirror(self, [])
        self.is_stale = True

    @property
    def is_single(self) -> bool:
        """Whether there is one replica, for which a module can be used as it is."""
        return len(self._places) == 1

    def leaves_of(self, parameter: Tensor) -> Leaves | None:
        """Returns the leaves of a primary parameter, if it has any."""
        return self._leaves.get(id(parameter))

    def owns(self, parameter: Tensor) -> bool:
        """Whether `parameter` is one of a primary module."""
        parameters = (raw(module)["_parameters"].values() for module in self._modules)
        return any(parameter is own for owned in parameters for own in owned)

    @property
    def all_leaves(self) -> list[Leaves]:
        """The leaves of all parameters, in the order in which their modules were made."""
        return list(self._leaves.values())

    def refresh(self) -> None:
        """Before a run: brings the clones up to date with their primaries."""
        if self.is_stale or not all(leaves.is_current() for leaves in self._leaves.values()):
            self._rebuild()
        for module in self._modules:
            self._give_buffers(module)
        self.num_runs += 1

    def _primaries(self) -> list[nn.Module]:
        return sorted(self._modules, key=self._order.__getitem__)

    def _rebuild(self) -> None:
        primaries = self._primaries()
        known = self._leaves
        self._leaves = {}
        for module in primaries:
            self.move(module)
            for parameter in raw(module)["_parameters"].values():
                if parameter is not None and id(parameter) not in self._leaves:
                    self._leaves[id(parameter)] = self._leaves_for(module, parameter, known)
        for module in primaries:
            mirror = raw(module)[MIRROR]
            while len(mirror.replicas) < len(self._memories):
                mirror.replicas.append(self._bare_clone(module))
        for module in primaries:
            self._give_attributes(module)
        self.is_stale = False
        self.generation += 1

    def _bare_clone(self, module: nn.Module) -> nn.Module:
        cls: Any = plain_class(type(module))
        clone: nn.Module = object.__new__(synchronized(cls) if self._synchronizes else cls)
        clone.__dict__.update(_parameters={}, _buffers={}, _modules={})
        return clone

    def move(self, module: nn.Module) -> None:
        """Puts a module on the first replica's device; its parameters stay the same objects."""
        place = self._places[0]
        if place.type != "cpu":
            nn.Module._apply(module, lambda tensor: tensor.to(place), recurse=False)

    def _leaves_for(
        self, module: nn.Module, parameter: nn.Parameter, known: dict[int, Leaves]
    ) -> Leaves:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UnsupportedError(
                f"{type(module).__name__} has parameters without a shape yet. Call the model once "
                "with a batch, before `run`, so that all replicas start from the same values."
            )
        before = known.get(id(parameter))
        if before is not None and before.primary is parameter and before.is_current():
            return before
        return Leaves(parameter, self._memories, self._places)

    def _give_attributes(self, module: nn.Module) -> None:
        mirror: Mirror = raw(module)[MIRROR]
        attributes = {name: v for name, v in raw(module).items() if name != MIRROR}
        for replica_id, clone in enumerate(mirror.replicas):
            for name, value in attributes.items():
                if name == "_parameters":
                    clone.__dict__[name] = {n: self._seen(p, replica_id) for n, p in value.items()}
                elif name == "_modules":
                    clone.__dict__[name] = {n: self._seen(m, replica_id) for n, m in value.items()}
                elif name == "_buffers":
                    clone.__dict__.setdefault(name, {})
                elif name not in mirror.given or mirror.given[name] is not value:
                    clone.__dict__[name] = self._seen(value, replica_id)
            for name in mirror.given.keys() - attributes.keys():
                clone.__dict__.pop(name, None)
        mirror.given = attributes

    def _seen(self, value: Any, replica_id: int) -> Any:
        """Returns what a replica sees where the primary has `value`."""
        if isinstance(value, nn.Module):
            mirror = raw(value).get(MIRROR)
            return value if mirror is None else mirror.replicas[replica_id]
        if isinstance(value, nn.Parameter):
            leaves = self._leaves.get(id(value))
            return value if leaves is None else leaves.leaves[replica_id]
        if type(value) in (list, tuple):
            # Such as the flat weights of recurrent layers, which are listed a second time.
            seen = [self._seen(one, replica_id) for one in value]
            is_same = all(a is b for a, b in zip(seen, value, strict=True))
            return value if is_same else type(value)(seen)
        return value

    def _give_buffers(self, module: nn.Module) -> None:
        """Gives each clone buffers of its own, and what has been written to the primary's since."""
        mirror: Mirror = raw(module)[MIRROR]
        buffers: dict[str, Tensor | None] = raw(module)["_buffers"]
        for clone in mirror.replicas:
            for name in clone._buffers.keys() - buffers.keys():
                del clone._buffers[name]
        for name, buffer in buffers.items():
            stamps = mirror.buffers.get(name)
            if stamps is not None and stamps[0].fits(buffer):
                continue
            for clone, place in zip(mirror.replicas, self._places, strict=True):
                own = None if buffer is None else buffer.detach().to(place, copy=True)
                clone._buffers[name] = own
            self._stamp_buffer(module, name)

    def _stamp_buffer(self, module: nn.Module, name: str) -> None:
        """Notes the primary's buffer, and those of the clones after it."""
        mirror: Mirror = raw(module)[MIRROR]
        owners = [raw(module)["_buffers"], *(clone._buffers for clone in mirror.replicas)]
        mirror.buffers[name] = [_Stamp.of(buffers[name]) for buffers in owners]

    def read_buffers(self, module: nn.Module) -> None:
        """Brings what the replicas have done to their buffers into the primary's.

        Floating-point buffers are averaged (the running statistics of batch normalisation), others
        are taken from replica 0 (its counters). What no replica has written stays as it is.
        """
        mirror: Mirror = raw(module)[MIRROR]
        if mirror.runs_read == self.num_runs or not mirror.replicas:
            return
        mirror.runs_read = self.num_runs
        for name, buffer in raw(module)["_buffers"].items():
            stamps = mirror.buffers.get(name)
            if buffer is None or stamps is None or not stamps[0].fits(buffer):
                continue
            parts: list[Any] = [clone._buffers[name] for clone in mirror.replicas]
            if all(stamp.fits(part) for stamp, part in zip(stamps[1:], parts, strict=True)):
                continue
            with torch.no_grad():
                buffer.copy_(self._mean(parts) if buffer.is_floating_point() else parts[0])
            self._stamp_buffer(module, name)

    def _mean(self, parts: list[Tensor]) -> Tensor:
        here = [part.detach().to(self._places[0]) for part in parts]
        return reduce_batch(ReduceOp.MEAN, [tuple(here)], [1])[0][0]

    def spread(self, parameters: Iterable[Tensor]) -> None:
        """After an update of the primaries: copies them to the memories that have their own."""
        for parameter in parameters:
            leaves = self._leaves.get(id(parameter))
            if leaves is not None:
                for leaf in leaves.first_in_each_memory():
                    leaf.detach().copy_(parameter.detach())


def plain_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the user's class of a primary."""
    return getattr(cls, "_unisono_plain_class", cls)
