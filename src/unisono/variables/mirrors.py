"""A module once, and a clone of it for every replica.

The user's module stays the one that is read, saved and updated: the *primary*. Each replica has a
*clone* with the same attributes, whose parameters are *leaves* that share the primary's storage
(where they share its memory) but collect gradients of their own, and whose buffers are its own. In
a replica's thread the primary answers with the clone, so that no two threads ever touch the same
leaf or the same module.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from unisono.errors import UnsupportedError
from unisono.reductions import Workers
from unisono.variables.batch_norm import synchronized
from unisono.variables.buffers import Buffers
from unisono.variables.leaves import Leaves, clear, fit_for_training

MIRROR = "_unisono_mirror"

_is_current = operator.methodcaller("is_current")


def raw(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes that a module itself has, whoever asks."""
    attributes: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return attributes


@dataclass(eq=False)
class Mirror:
    """What a primary module knows of its clones."""

    owner: Mirrors
    replicas: list[nn.Module]
    # What the clones were last given of the primary's attributes.
    given: dict[str, Any] = field(default_factory=dict)


class Mirrors:
    """The modules of one strategy and their clones."""

    def __init__(
        self,
        memories: tuple[Hashable, ...],
        places: tuple[torch.device, ...],
        *,
        workers: Workers,
        synchronize_batch_norm: bool = False,
    ) -> None:
        self._workers = workers
        # What every worker has of the chief already.
        self._shared: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._synchronizes = synchronize_batch_norm
        self._memories = memories
        self._places = places
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._order: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._leaves: dict[int, Leaves] = {}
        # Of these, what belongs to no module.
        self._free: list[Leaves] = []
        self.buffers = Buffers(places, workers)
        self._num_adopted = 0
        self.is_stale = False
        # Whether something belongs to it.
        self.is_in_use = False
        # Whether there is one replica, for which a module can be used as it is.
        self.is_single = len(places) == 1 and not workers.are_many
        # For each replica, by the identity of a primary parameter, its leaf.
        self.stand_ins: list[dict[int, nn.Parameter]] = [{} for _ in places]
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
    def has_one_memory(self) -> bool:
        """Whether all replicas of this worker share the storage of every parameter."""
        return len(set(self._memories)) == 1

    def share_new(self) -> None:
        """Gives every worker what the chief has of what is new."""
        if not self._workers.are_many:
            return
        held = (
            tensor
            for module in self._primaries()
            for tensor in (*raw(module)["_parameters"].values(), *raw(module)["_buffers"].values())
        )
        new = [
            tensor
            for tensor in held
            if tensor is not None
            and not nn.parameter.is_lazy(tensor)
            and tensor not in self._shared
        ]
        self._workers.share(new)
        for tensor in new:
            self._shared[tensor] = True

    def is_sparse(self, leaves: Leaves) -> bool:
        """Whether a parameter has sparse gradients, as far as its modules tell."""
        return any(
            raw(module).get("sparse", False)
            for module in self._modules
            if any(one is leaves.primary for one in raw(module)["_parameters"].values())
        )

    def leaves_of(self, parameter: Tensor) -> Leaves | None:
        """Returns the leaves of a primary parameter, if it has any."""
        return self._leaves.get(id(parameter))

    def add(self, leaves: Leaves) -> None:
        """Adds the leaves of what belongs to no module; they stay as long as they are current."""
        self._free.append(leaves)
        self._leaves[id(leaves.primary)] = leaves
        for stand_ins, leaf in zip(self.stand_ins, leaves.leaves, strict=True):
            stand_ins[id(leaves.primary)] = leaf
        self.generation += 1

    def owns(self, parameter: Tensor) -> bool:
        """Whether `parameter` is one of a primary module, or belongs to none but is shared."""
        if any(parameter is leaves.primary for leaves in self._free):
            return True
        parameters = (raw(module)["_parameters"].values() for module in self._modules)
        return any(parameter is own for owned in parameters for own in owned)

    def primary_of(self, leaf: object) -> nn.Parameter | None:
        """Returns the parameter that a replica has `leaf` of, if there is one."""
        owners = (one for one in self._leaves.values() if any(leaf is own for own in one.leaves))
        return next((one.primary for one in owners), None)

    @property
    def all_leaves(self) -> list[Leaves]:
        """The leaves of all that is trained: variables, then modules in the order of making."""
        return list(self._leaves.values())

    def refresh(self) -> None:
        """Before a run: brings the clones up to date with their primaries."""
        if self.is_stale or not all(map(_is_current, self._leaves.values())):
            self.share_new()
            with fit_for_training():
                self._rebuild()
        for leaves in self._leaves.values():
            leaves.catch_up()
        self.buffers.give()

    def _primaries(self) -> list[nn.Module]:
        return sorted(self._modules, key=self._order.__getitem__)

    def _rebuild(self) -> None:
        primaries = self._primaries()
        known = self._leaves
        self._free = [one for one in self._free if one.is_current()]
        self._leaves = {id(one.primary): one for one in self._free}
        for module in primaries:
            self.move(module)
            for parameter in raw(module)["_parameters"].values():
                if parameter is not None and id(parameter) not in self._leaves:
                    self._leaves[id(parameter)] = self._leaves_for(module, parameter, known)
        for module in primaries:
            mirror = raw(module)[MIRROR]
            cls = self._clone_class(module)
            while len(mirror.replicas) < len(self._memories):
                mirror.replicas.append(_bare_clone(cls))
            for clone in mirror.replicas:
                # A parametrization that came later has changed the class of the primary.
                clone.__class__ = cls
        for module in primaries:
            self._give_attributes(module)
        self.buffers.track((module, raw(module)[MIRROR].replicas) for module in primaries)
        self.is_stale = False
        if list(map(id, known.values())) != list(map(id, self._leaves.values())):
            # Not for `model.eval()`, which one worker may call alone: packs are made together.
            self.generation += 1
        self.stand_ins = [
            {key: one.leaves[i] for key, one in self._leaves.items()}
            for i in range(len(self._places))
        ]

    def _clone_class(self, module: nn.Module) -> type[nn.Module]:
        cls: Any = plain_class(type(module))
        return synchronized(cls) if self._synchronizes else cls

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
        return Leaves.made_for(parameter, self._memories, self._places)

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

    def clear_gradient(self, parameter: Tensor, *, set_to_none: bool) -> None:
        """Clears the gradients that the replicas have of a parameter."""
        leaves = self._leaves.get(id(parameter))
        for leaf in leaves.leaves if leaves is not None else ():
            clear(leaf, set_to_none=set_to_none)

    def spread(self, parameters: Iterable[Tensor]) -> None:
        """After an update of the primaries: copies them to the memories that have their own."""
        for parameter in parameters:
            leaves = self._leaves.get(id(parameter))
            if leaves is not None:
                leaves.spread()


def _bare_clone(cls: type[nn.Module]) -> nn.Module:
    clone: nn.Module = object.__new__(cls)
    clone.__dict__.update(_parameters={}, _buffers={}, _modules={})
    return clone


def plain_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Returns the user's class of a primary; one that was derived from it later, as it is."""
    plain: type[nn.Module] = vars(cls).get("_unisono_plain_class", cls)
    return plain
