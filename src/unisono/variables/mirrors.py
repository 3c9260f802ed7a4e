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
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from unisono.errors import UnsupportedError
from unisono.kernels import reduce_batch
from unisono.options import ReduceOp
from unisono.reductions import Workers
from unisono.variables.batch_norm import synchronized
from unisono.variables.groups import GroupCopies
from unisono.variables.leaves import Leaves, clear, fit_for_training, version_of
from unisono.variables.written import Watch, let_data_be_watched

MIRROR = "_unisono_mirror"

_is_current = operator.methodcaller("is_current")


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
        return cls(tensor, version_of(tensor))

    def fits(self, tensor: Tensor | None) -> bool:
        return self.tensor is tensor and version_of(tensor) == self.version


@dataclass(eq=False)
class Mirror:
    """What a primary module knows of its clones."""

    owner: Mirrors
    replicas: list[nn.Module]
    # What the clones were last given of the primary's attributes and buffers, and the run after
    # which their own buffers were last read.
    given: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, _Stamp] = field(default_factory=dict)
    runs_read: int = 0


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
        self._workers = self.workers = workers
        # What every worker has of the chief already.
        self._shared: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.synchronizes = synchronize_batch_norm
        self._memories = memories
        self._places = places
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._order: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._leaves: dict[int, Leaves] = {}
        # Of these, what belongs to no module.
        self._free: list[Leaves] = []
        # The modules whose buffers are looked at before every run.
        self._buffer_owners: list[weakref.ref[nn.Module]] = []
        self._num_adopted = 0
        self.is_stale = False
        # Whether something belongs to it.
        self.is_in_use = False
        # Whether there is one replica, for which a module can be used as it is.
        self.is_single = len(places) == 1 and not workers.are_many
        self.num_runs = 0
        # For each replica, by the identity of a primary parameter, its leaf.
        self.stand_ins: list[dict[int, nn.Parameter]] = [{} for _ in places]
        # Changes whenever there are other leaves than before.
        self.generation = 0
        # Reduces the gradients that replicas have written themselves. Set by the reducer.
        self.reduce_rest: Callable[[Iterable[Leaves]], None] = lambda _: None
        self.watch = Watch(self)
        self.groups = GroupCopies(workers)

    def adopt(self, module: nn.Module) -> None:
        """Makes `module` a primary; its clones are made before the next run."""
        if MIRROR in raw(module):
            return
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{type(module).__name__} is a TorchScript module, which cannot be mirrored. Build "
                "the plain module in the scope, and script it after training."
            )
        let_data_be_watched()
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
            for module in self.primaries()
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

    def module_of(self, clone: nn.Module) -> nn.Module | None:
        """Returns the module that a replica has `clone` of, if there is one."""
        return next(
            (m for m in self._modules if any(clone is own for own in raw(m)[MIRROR].replicas)), None
        )

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
        for owner in self._buffer_owners:
            module = owner()
            if module is not None:
                self._give_buffers(module)
        self.num_runs += 1
        self.watch.stamp()

    def primaries(self) -> list[nn.Module]:
        """Returns the modules, in the order of making."""
        return sorted(self._modules, key=self._order.__getitem__)

    def _rebuild(self) -> None:
        primaries = self.primaries()
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
        self._buffer_owners = [weakref.ref(m) for m in primaries if raw(m)["_buffers"]]
        self.is_stale = False
        self.generation += 1
        for i, stand_ins in enumerate(self.stand_ins):
            stand_ins.clear()
            stand_ins.update({key: one.leaves[i] for key, one in self._leaves.items()})

    def _clone_class(self, module: nn.Module) -> type[nn.Module]:
        cls: Any = plain_class(type(module))
        return synchronized(cls) if self.synchronizes else cls

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

    def _give_buffers(self, module: nn.Module) -> None:
        """Gives each clone buffers of its own, and what has been written to the primary's since."""
        mirror: Mirror = raw(module)[MIRROR]
        buffers: dict[str, Tensor | None] = raw(module)["_buffers"]
        for clone in mirror.replicas:
            for name in clone._buffers.keys() - buffers.keys():
                del clone._buffers[name]
        for name, buffer in buffers.items():
            stamp = mirror.buffers.get(name)
            if stamp is not None and stamp.fits(buffer):
                continue
            with fit_for_training():
                for clone, place in zip(mirror.replicas, self._places, strict=True):
                    own = None if buffer is None else buffer.detach().to(place, copy=True)
                    clone._buffers[name] = own
            mirror.buffers[name] = _Stamp.of(buffer)

    def read_buffers(self, module: nn.Module) -> None:
        """Brings what the replicas have done to their buffers into the primary's.

        Floating-point buffers are averaged (the running statistics of batch normalisation), others
        are taken from replica 0 (its counters). What no replica has written stays as it is. With
        many workers, all must read.
        """
        mirror: Mirror = raw(module)[MIRROR]
        if mirror.runs_read == self.num_runs or not mirror.replicas:
            return
        mirror.runs_read = self.num_runs
        buffers = raw(module)["_buffers"]
        names = [n for n, b in buffers.items() if b is not None and n in mirror.buffers]
        names = [name for name in names if mirror.buffers[name].fits(buffers[name])]
        parts: dict[str, list[Any]] = {
            name: [clone._buffers[name] for clone in mirror.replicas] for name in names
        }
        # torch does not count the writes of its batch normalisation, so the values must tell.
        written = [
            any(not torch.equal(part.to(buffers[name].device), buffers[name]) for part in own)
            for name, own in parts.items()
        ]
        for name, is_written in zip(names, self._workers.any_of(written), strict=True):
            if not is_written:
                continue
            buffer = buffers[name]
            with torch.no_grad():
                buffer.copy_(self._one_of(parts[name], is_mean=buffer.is_floating_point()))
            # The replicas go on from what was read, as a program that resumes from it does.
            del mirror.buffers[name]

    def _one_of(self, parts: list[Any], *, is_mean: bool) -> Tensor:
        here = [part.detach().to(self._places[0]) for part in parts]
        if not is_mean:
            return self._workers.of_chief(here[0])
        everybody = [one for own in here for one in self._workers.gather(own)]
        # Gathered replica by replica, from all workers each time: back to the order of their ids.
        num_workers = len(everybody) // len(here)
        ordered = [one for i in range(num_workers) for one in everybody[i::num_workers]]
        return reduce_batch(ReduceOp.MEAN, [tuple(ordered)], [1])[0][0]

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
