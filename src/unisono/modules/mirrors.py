"""Modules, with one clone per replica.

The user's module stays the one that is read, saved and updated: the *primary*. Each replica has a
*clone* with the same attributes, whose parameters are *leaves* that share the primary's storage
(where they share its memory) but collect their own gradients, and whose buffers are its own. In
a replica's thread the primary answers with the clone, so that no two threads ever touch the same
leaf or the same module.
"""

from __future__ import annotations

import itertools
import operator
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from unisono.errors import ContextError, UnsupportedError
from unisono.modules.attributes import TABLES_OF_OWN, Attributes, Contents, raw
from unisono.modules.buffers import Buffers
from unisono.modules.front import Fronts, Mirror, Redirect, plain_class, set_classes
from unisono.modules.leaves import Leaves, catch_up, fit_for_training, needs_grad, spread
from unisono.modules.metric_notes import NoMetrics, tracked
from unisono.modules.owners import give_to, owner_of
from unisono.modules.shared_tensors import SharedTensors
from unisono.modules.torch_calls import HookTables, synchronized
from unisono.modules.updates import GroupCopies, UpdatesAtOnce
from unisono.modules.written import Watch, let_data_be_watched
from unisono.reductions import Workers

T = TypeVar("T")

_shape_of = operator.attrgetter("shape")


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
        self.workers = workers
        self.shared = SharedTensors(workers)
        self.synchronizes = synchronize_batch_norm
        # By the identity of a primary, in the order of making.
        self.mirrors: dict[int, Mirror] = {}
        # The parameters, buffers and submodules of all primaries as the clones were given them.
        self._tables = Contents()
        # What has another class in a run: modules, parameters, and objects that do work once.
        self.fronts = Fronts()
        # The leaves of all that is trained: what belongs to no module, such as variables, then
        # modules in the order of making. Replaced as a whole.
        self.all_leaves: list[Leaves] = []
        # Of these, the first ones.
        self._free: list[Leaves] = []
        # Of the others, the primaries, and the leaves of the first replica.
        self._compared: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
        # The parameters that show a gradient of which the leaves that are made next get copies.
        self.showing: set[int] = set()
        self._lay_out(memories, places)
        self.is_stale = False
        # Whether the strategy has any object.
        self.is_in_use = False
        # Whether there is one replica, for which a module can be used as it is.
        self.is_single = len(places) == 1 and not workers.are_many
        # By identity, the modules of a single replica.
        self.singles: dict[int, weakref.ref[nn.Module]] = {}
        # Changes whenever there are other leaves than before.
        self.generation = 0
        # Reduces the gradients that replicas have written themselves. Set by the reducer.
        self.reduce_rest: Callable[[Iterable[Leaves]], None] = lambda _: None
        # Called before a run writes to the program's own objects. Set by a `Snapshot`.
        self.before_writes: Callable[[], None] = lambda: None
        self.postponed = UpdatesAtOnce()
        self.watch = Watch(self)
        self.groups = GroupCopies(workers)
        self.hooks = HookTables(self)
        # The steps whose backward passes were seen to reach own leaves, whether that of this run
        # is one of them, and whether it becomes one.
        self._checked: dict[int, object] = {}
        self.is_checked = self.is_being_checked = False
        # The parameters of the process that belong to others, and of when this is.
        self.outsiders: tuple[object, list[weakref.ref[Tensor]]] = None, []
        # By identity, tensors of no model that a replica uses in this run as if they were its own:
        # running statistics that it writes to, and leaves that it trains. And which replica.
        self.claimed: dict[int, tuple[int, Tensor]] = {}

    def _lay_out(self, memories: tuple[Hashable, ...], places: tuple[torch.device, ...]) -> None:
        self.memories = memories
        # Whether the replicas have several memories.
        self.is_spread = len(set(memories)) > 1
        self.places = places
        self.attributes = Attributes(len(places), self.stand_in)
        self.buffers = Buffers(places, self.workers)
        self.metrics = NoMetrics()
        # By the identity of a primary parameter or of one of its leaves.
        self.owners: dict[int, Leaves] = {}

    def relayout(self, memories: tuple[Hashable, ...], places: tuple[torch.device, ...]) -> None:
        """Between runs: forgets the replicas of this worker. The next run makes others."""
        for mirror in list(self.mirrors.values()):
            self.attributes.check_given(mirror.replicas, mirror.given)
        for one in self.all_leaves:
            if one.is_hidden():
                raise UnsupportedError(
                    f"A gradient of {self.name_of(one.primary)} was not reduced in its run, so no "
                    "other worker can take over the replica that has it. Leave `no_sync()` before "
                    "the last backward pass of a run."
                )
        for one in self.all_leaves:
            # It may lie in memory of the workers that were.
            if one.primary.grad is not None:
                one.primary.grad = one.primary.grad.detach().clone()
                if one.is_shown:
                    self.showing.add(id(one.primary))
        self.all_leaves, self._free = [], []
        for mirror in list(self.mirrors.values()):
            mirror.replicas, mirror.given = [], {}
        self._lay_out(memories, places)
        self.is_stale = True

    def _forget(self, identity: int) -> None:
        """Called when a primary is freed: frees its parameters and submodules, too."""
        self.mirrors.pop(identity, None)
        if not self.workers.are_many:
            # Workers collect garbage at different times, but must rebuild in the same run.
            self._tables.forget()
            self.is_stale = True

    def give_again(self, module: nn.Module, name: str) -> None:
        """Lets the clones of a module get an attribute again, even if its value has not changed."""
        # Equal to no attribute.
        self.mirrors[id(module)].given[name] = (0, None)
        self.is_stale = True

    def share_new(self) -> None:
        """Gives every worker what the chief has of what is new."""
        self.shared.share(self.primaries())

    def leaves_of(self, parameter: Tensor) -> Leaves | None:
        """Returns the leaves of a primary parameter, if it has any."""
        owner = self.owners.get(id(parameter))
        return owner if owner is not None and owner.primary is parameter else None

    def add(self, leaves: Leaves) -> None:
        """Adds the leaves of what belongs to no module; they stay as long as they are current."""
        place = len(self._free)
        self.generation += 1
        self._free = [*self._free, leaves]
        self.all_leaves = [*self.all_leaves[:place], leaves, *self.all_leaves[place:]]
        self.owners.update(_identities(leaves))

    def owns(self, parameter: Tensor) -> bool:
        """Whether `parameter` is one of a primary module, or belongs to none but is shared."""
        if any(parameter is leaves.primary for leaves in self._free):
            return True
        parameters = (raw(module)["_parameters"].values() for module in self.primaries())
        return any(parameter is own for owned in parameters for own in owned)

    def of_program(self, part: Any) -> Any:
        """Returns what the program has of a module or parameter that a replica has."""
        if isinstance(part, Tensor):
            owner = self.owners.get(id(part))
            return part if owner is None else owner.primary
        # A copy, because the garbage collector may free a module meanwhile, on any thread.
        for mirror in [*self.mirrors.values()] if isinstance(part, nn.Module) else ():
            if any(part is own for own in mirror.replicas):
                return mirror.primary() or part
        return part

    def name_of(self, parameter: Tensor) -> str:
        """Returns the name of a primary parameter in its model, such as `encoder.weight` of Net."""
        modules = self.primaries()
        parts = {id(part) for module in modules for part in raw(module)["_modules"].values()}
        for module in modules:
            if id(module) not in parts:
                for name in _paths(module, parameter, set()):
                    return f"`{name}` of {type(module).__name__}"
        return f"a parameter of shape {tuple(parameter.shape)}"

    def refresh(self) -> None:
        """Before a run: updates the clones from their primaries."""
        if not self.are_as_given() or not self._are_current():
            self._adopt_new()
            self.share_new()
            with fit_for_training():
                self._rebuild()
        self.hooks.refresh()
        if self.is_spread:
            spread([one for one in self.all_leaves if one.is_behind()])
        catch_up(self.all_leaves)
        self.buffers.give()
        self.metrics.begin()
        self.watch.stamp()

    def _are_current(self) -> bool:
        """Whether all leaves are what their primaries are; see `Leaves.is_current`."""
        # Of parameters of modules by loops in C.
        primaries, firsts = self._compared
        return (
            list(map(Tensor.data_ptr, primaries)) == list(map(Tensor.data_ptr, firsts))
            and list(map(needs_grad, primaries)) == list(map(needs_grad, firsts))
            and list(map(_shape_of, primaries)) == list(map(_shape_of, firsts))
            and all(one.is_current() for one in self._free)
        )

    def are_as_given(self) -> bool:
        """Whether the clones still match their primaries, by a quick check in C."""
        return not self.is_stale and self._tables.are_same() and self.attributes.given.are_same()

    def call_in_use(self, step: object, run: Callable[[], T]) -> T:
        """Makes a run of `step`: replicas see their clones, and what they do once happens once."""
        code = getattr(step, "__code__", step)
        self.is_checked, self.is_being_checked = self._checked.get(id(code)) is code, False
        try:
            result = self.fronts.up_during(run, self.all_leaves)
        finally:
            self.claimed = {}
            self.hooks.settle()
        if self.is_being_checked:
            self._checked[id(code)] = code
        return result

    def clones_of(self, replica_ids: Sequence[int]) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Yields every module and its clone for each of some replicas."""
        for module in self.primaries():
            replicas = self.mirrors[id(module)].replicas
            yield from ((module, replicas[i]) for i in replica_ids if replicas)

    def primaries(self) -> list[nn.Module]:
        """Returns the modules, in the order of making."""
        found = (mirror.primary() for mirror in list(self.mirrors.values()))
        return [module for module in found if module is not None]

    def modules(self) -> list[nn.Module]:
        """Returns the modules, also those that have no clones because there is one replica."""
        alone = (module() for module in list(self.singles.values()))
        return self.primaries() + [module for module in alone if module is not None]

    def _adopt_new(self) -> None:
        """Adopts modules that were put into primaries, also behind torch's back."""
        for primary in self.primaries():
            for child in raw(primary)["_modules"].values():
                if child is not None and owner_of(child) is None:
                    for module in child.modules():
                        self.take_in(module)

    def take_in(self, module: nn.Module) -> None:
        """Makes one module, without its submodules, belong to these mirrors."""
        owner = owner_of(module)
        if owner is not None and owner is not self:
            raise ContextError(
                f"This {type(module).__name__} belongs to another strategy. Make one in the scope, "
                "and not in a default argument, or mirror a copy, which `copy.deepcopy` makes."
            )
        self.is_in_use = True
        if self.is_single:
            self.move(module)
            self.singles[id(module)] = weakref.ref(module)
            return
        if owner is self:
            return
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"{type(module).__name__} is a TorchScript module, which cannot be mirrored. Make "
                "the plain module in the scope, and script it after training."
            )
        if isinstance(module, (DataParallel, DistributedDataParallel)):
            raise UnsupportedError(
                f"{type(module).__name__} cannot be used in a strategy, which splits batches and "
                "reduces gradients itself. Make the plain model in the scope."
            )
        let_data_be_watched()
        identity = id(module)
        # Its clones are made before the next run.
        self.mirrors[identity] = Mirror(weakref.ref(module, lambda _: self._forget(identity)))
        give_to(module, self)
        self.fronts.add(module, Redirect)
        self.is_stale = True

    def _rebuild(self) -> None:
        # Until all is done, because Ctrl-C may come between.
        self.is_stale = True
        primaries = self.primaries()
        free = [one for one in self._free if one.is_current()]
        found = {id(one.primary): one for one in free}
        for module in primaries:
            self.move(module)
            for parameter in raw(module)["_parameters"].values():
                if parameter is not None and id(parameter) not in found:
                    found[id(parameter)] = self._leaves_for(module, parameter)
        leaves = list(found.values())
        if leaves != self.all_leaves:
            # Not for `model.eval()`, which one worker may call alone: packs are made together.
            self.generation, self._checked = self.generation + 1, {}
        self.all_leaves, self._free = leaves, free
        self.owners = _identities(*leaves)
        of_modules = leaves[len(free) :]
        self._compared = [one.primary for one in of_modules], [one.leaves[0] for one in of_modules]
        for module in primaries:
            mirror = self.mirrors[id(module)]
            cls = plain_class(type(module))
            cls = synchronized(cls) if self.synchronizes else cls
            while len(mirror.replicas) < len(self.memories):
                clone: nn.Module = object.__new__(cls)
                clone.__dict__.update(_parameters={}, _buffers={}, _modules={})
                mirror.replicas.append(clone)
            # A parametrization that came later has changed the class of the primary.
            set_classes(mirror.replicas, itertools.repeat(cls))
        self.attributes.give([self.mirrors[id(module)] for module in primaries])
        own = list(map(raw, primaries))
        # Of buffers their names, by live views.
        names = (one["_buffers"].keys() for one in own)
        tables = (one[name] for name in TABLES_OF_OWN for one in own)
        self._tables.note([*tables, *names])
        pairs = [(module, self.mirrors[id(module)].replicas) for module in primaries]
        self.buffers.track(pairs)
        self.metrics = tracked(self.metrics, pairs, self.places, self.workers)
        self.watch.note_parts(clone for _, clones in pairs for clone in clones)
        self.hooks.by_identity = None
        self.fronts.capture(self.all_leaves)
        self.is_stale = False

    def move(self, module: nn.Module) -> None:
        """Puts a module on the first replica's device; its parameters stay the same objects."""
        place = self.places[0]
        if place.type != "cpu":
            nn.Module._apply(module, lambda tensor: tensor.to(place), recurse=False)

    def _leaves_for(self, module: nn.Module, parameter: nn.Parameter) -> Leaves:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise UnsupportedError(
                f"{type(module).__name__} has parameters without a shape yet. Call the model once "
                "with a batch, before `run`, so that all replicas start from the same values."
            )
        before = self.leaves_of(parameter)
        if type(before) is Leaves:
            if not before.is_current():
                # Packs and captured steps know addresses, shapes and what is trained.
                self.generation, self._checked = self.generation + 1, {}
                before.follow(self.places)
            return before
        made = Leaves.made_for(parameter, self.memories, self.places)
        if id(parameter) in self.showing:
            self.showing.discard(id(parameter))
            made.give_gradient()
        return made

    def stand_in(self, value: Any, replica_id: int) -> Any:
        """Returns what a replica sees in place of a module, a parameter or a method of a module."""
        if isinstance(value, Tensor):
            leaves = self.leaves_of(value)
            return value if leaves is None else leaves.leaves[replica_id]
        is_method = isinstance(value, types.MethodType)
        mirror = self.mirrors.get(id(value.__self__ if is_method else value))
        if mirror is None:
            return value
        clone = mirror.replicas[replica_id]
        return types.MethodType(value.__func__, clone) if is_method else clone


def _paths(module: nn.Module, parameter: Tensor, seen: set[int]) -> Iterator[str]:
    seen.add(id(module))
    yield from (name for name, own in raw(module)["_parameters"].items() if own is parameter)
    for name, part in raw(module)["_modules"].items():
        if isinstance(part, nn.Module) and id(part) not in seen:
            yield from (f"{name}.{path}" for path in _paths(part, parameter, seen))


def _identities(*owners: Leaves) -> dict[int, Leaves]:
    return {id(own): one for one in owners for own in (one.primary, *one.leaves)}
