"""What a step must leave as it is: parameters, which only one call for all replicas may write.

All replicas of a memory share the storage of a parameter, and the count of writes that torch keeps
for it. So a write by `p.add_()`, `p.data.copy_()`, an initialization or `load_state_dict()` on any
replica is seen by a look at that count, wherever the replicas meet and when the run ends. Which
parameters and submodules the modules have is looked at when the run ends.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from unisono.contexts import CrossReplicaContext, ReplicaContext, current_context, current_replica
from unisono.errors import ContextError
from unisono.modules.attributes import TABLES_OF_OWN, Contents, raw
from unisono.modules.leaves import Leaves, fit_for_training, needs_grad, spread
from unisono.modules.owners import StateNote
from unisono.sharing import LiveSet, computed_once, in_place_of
from unisono.torch_private import data_of_tensors

if TYPE_CHECKING:
    from unisono.modules.mirrors import Mirrors

_REMEDY = (
    "Write once for all replicas with `unisono.once`, for example `unisono.once(lambda: "
    "model.weight.data.mul_(0.5))`."
)
_watches: LiveSet[Watch] = LiveSet()
# Those whose parameters are in several memories, so that all writes must be seen.
_spread_watches: LiveSet[Watch] = LiveSet()


class _Attribute(str):
    """What a tensor is called that a module has as a plain attribute."""


class Watch:
    """Sees what the replicas of one strategy write to what they share, or set for themselves."""

    def __init__(self, mirrors: Mirrors) -> None:
        self.mirrors = weakref.ref(mirrors)
        self._generation = -1
        # Parameters in each memory, their copies and attributes of modules; whose each is, or what
        # it is called; and how often each was written to.
        self._tensors: list[Tensor] = []
        self._owners: list[Leaves | str] = []
        self._versions: list[int] = []
        self._attributes: object = None
        # Copies of the parameters that belong to no strategy, so that all replicas share them.
        self._copies: list[tuple[weakref.ref[Tensor], str]] = []
        # Any thread may copy a parameter.
        self._lock = threading.Lock()
        # By the identity of an optimizer, the state that replicas have looked at in this run.
        self.states: dict[int, StateNote] = {}
        # The tables of parameters and submodules of clones. What a replica sets there it has alone:
        # no other replica, no optimizer and no checkpoint would know of it.
        self._parts = Contents()
        _watches.add(self)

    def stamp(self) -> None:
        """From now on, what is written is written by replicas."""
        mirrors = self.mirrors()
        assert mirrors is not None
        attributes = mirrors.attributes.tensors
        if self._generation != mirrors.generation or self._attributes is not attributes:
            watched = [
                (one, tensor)
                for one in mirrors.all_leaves
                for tensor in one.watched()
                if not tensor.is_inference()
            ]
            self._owners = [one for one, _ in watched]
            self._tensors = [tensor for _, tensor in watched]
            if mirrors.is_spread:
                _spread_watches.add(self)
            # Last, because Ctrl-C may come between. A copy that is added meanwhile has to be seen.
            with self._lock:
                self._add_copies()
                if len(mirrors.places) > 1:
                    self._add((tensor, _Attribute(name)) for tensor, name in attributes.values())
                self._generation = mirrors.generation
            self._attributes = attributes
        self._versions = [tensor._version for tensor in self._tensors]

    def check(self) -> None:
        """Raises if a replica has written to something that all share."""
        versions = [tensor._version for tensor in self._tensors]
        if versions != self._versions:
            changes = zip(self._owners, versions, self._versions, strict=True)
            self._refuse([owner for owner, new, old in changes if new != old])
        for state in self.states.values():
            state.check()

    def settle(self) -> None:
        """After something was done for all replicas: every memory gets what it has written."""
        mirrors = self.mirrors()
        assert mirrors is not None
        if mirrors.is_spread:
            # An optimizer has copied what it wrote already.
            owners = (one for one in self._owners if isinstance(one, Leaves))
            spread([one for one in dict.fromkeys(owners) if one.is_behind()])
        self._versions = [tensor._version for tensor in self._tensors]
        self.states = {}

    def add_copy(self, parameter: nn.Parameter, copy: Tensor) -> None:
        """Watches a copy of a parameter, if that is one of this strategy."""
        mirrors = self.mirrors()
        if mirrors is not None and not mirrors.is_single and mirrors.owns(parameter):
            name = f"a copy of {mirrors.name_of(parameter)}"
            with self._lock:
                self._copies.append((weakref.ref(copy), name))
                self._generation = -1

    def _add_copies(self) -> None:
        self._copies = [(copy, name) for copy, name in self._copies if copy() is not None]
        self._add((one, name) for copy, name in self._copies if (one := copy()) is not None)

    def _add(self, named: Iterable[tuple[Tensor, str]]) -> None:
        known = set(map(id, self._tensors))
        for tensor, name in named:
            if id(tensor) not in known and not tensor.is_inference():
                self._tensors.append(tensor)
                self._owners.append(name)

    def _refuse(self, written: list[Leaves | str]) -> NoReturn:
        mirrors = self.mirrors()
        assert mirrors is not None
        weights = (one for one in written if not isinstance(one, _Attribute))
        found = (one if isinstance(one, str) else mirrors.name_of(one.primary) for one in weights)
        names = list(dict.fromkeys(found))
        if not names:
            raise ContextError(
                f"A step wrote to the tensor in the attribute {written[0]}. All replicas share it, "
                "and each has written, so its values are wrong now. Make it a buffer "
                "(`register_buffer()`), assign a new tensor (`self.sum = self.sum + x`), or "
                "write once for all replicas with `unisono.once`."
            )
        others = len(names) - 1
        more = f" and {others} more parameter{'s'[: others - 1]}" if others else ""
        raise ContextError(
            f"A step wrote to {names[0]}{more}, which all replicas share, so the values are wrong "
            f"now: load them from a checkpoint. {_REMEDY}"
        )

    def note_parts(self, clones: Iterable[nn.Module]) -> None:
        """Before a run: notes the parameters and submodules that the clones of a replica have."""
        self._parts.note([raw(clone)[table] for clone in clones for table in TABLES_OF_OWN])

    def check_parts(self) -> None:
        """After a run: refuses what was set in it, and takes over `requires_grad`."""
        mirrors = self.mirrors()
        assert mirrors is not None
        if not self._parts.are_same():
            mirrors.is_stale = True
            raise ContextError(
                f"{_changed_part(mirrors)} was set on a replica, so it would be neither reduced "
                "nor saved. Set it outside `run`; if the first call makes layers, call the model "
                "once before `run`."
            )
        for one in mirrors.all_leaves:
            found = list(map(needs_grad, one.leaves))
            if found.count(one.primary.requires_grad) == len(found):
                continue
            mirrors.is_stale = True
            if len(set(found)) > 1:
                for leaf in one.leaves:
                    leaf.requires_grad_(one.primary.requires_grad)
                raise ContextError(
                    f"The parameter {mirrors.name_of(one.primary)} is trained on some replicas and "
                    "frozen on others after a step. Call `requires_grad_()` on all replicas, or "
                    "outside `run`."
                )
            with fit_for_training():
                one.primary.requires_grad_(found[0])


def _changed_part(mirrors: Mirrors) -> str:
    """Names the first parameter or submodule of a clone that is another than it was."""
    for i in range(len(mirrors.places)):
        for module, clone in mirrors.clones_of([i]):
            for table in TABLES_OF_OWN:
                found, before = raw(clone)[table], raw(module)[table]
                for name in [*found, *before]:
                    is_given = found.get(name) is mirrors.stand_in(before.get(name), i)
                    if not is_given or (name in found) != (name in before):
                        return f"`{type(clone).__name__}.{name}`"
    return "A parameter or submodule"


@computed_once
def let_data_be_watched() -> None:
    """Makes `parameter.data`, and copies of parameters, known to those who watch.

    What torch's `data` returns has its own count of writes. On a replica, and where a parameter is
    in several memories, `data` returns what `detach()` does: a tensor with the parameter's count.
    """
    get_data, set_data = data_of_tensors.__get__, data_of_tensors.__set__

    def get(self: nn.Parameter) -> Any:
        context = current_replica()
        if context is None:
            found = [mirrors for watch in _spread_watches if (mirrors := watch.mirrors())]
            is_watched = any(mirrors.leaves_of(self) is not None for mirrors in found)
        else:
            # A lazy parameter, which the replica itself has made, has no other tensor.
            is_single = context.replicas.mirrors.is_single
            is_watched = not is_single and not nn.parameter.is_lazy(self)
        return self.detach() if is_watched else get_data(self)

    def put(self: nn.Parameter, value: Tensor) -> None:
        context = current_context()
        if isinstance(context, ReplicaContext):
            if _is_shared(context.replicas.mirrors, self, value):
                # As `model.to(device)` does, where the model is there already.
                return
        elif isinstance(context, CrossReplicaContext):
            # Code that runs once for all replicas may have a replica's parameter.
            set_data(context.replicas.mirrors.of_program(self), value)
            return
        set_data(self, value)

    nn.Parameter.data = property(get, put, doc=data_of_tensors.__doc__)  # type: ignore[assignment]
    copied = nn.Parameter.__deepcopy__

    @in_place_of(nn.Parameter, "__deepcopy__")
    def deepcopy(self: nn.Parameter, memo: dict[int, Any]) -> Any:
        copy = copied(self, memo)  # type: ignore[no-untyped-call]
        for watch in _watches:
            watch.add_copy(self, copy)
        return copy

    flattened = nn.RNNBase.flatten_parameters

    @in_place_of(nn.RNNBase, "flatten_parameters")
    def flatten_parameters(self: nn.RNNBase) -> None:
        # It would move the weights of one replica away from the storage that all share.
        context = current_replica()
        if context is None or context.replicas.mirrors.is_single:
            flattened(self)


def _is_shared(mirrors: Mirrors, parameter: nn.Parameter, value: Any) -> bool:
    """Whether a parameter is one that replicas share, which may only be given its own memory."""
    owner = mirrors.owners.get(id(parameter))
    if owner is None or mirrors.is_single:
        return False
    if not isinstance(value, Tensor) or _place_of(value) != _place_of(parameter):
        raise ContextError(
            f"`data` of {mirrors.name_of(owner.primary)} was assigned on a replica, but all "
            f"replicas share the parameter. {_REMEDY}"
        )
    return True


def _place_of(tensor: Tensor) -> tuple[Any, ...]:
    place = tensor.device, tensor.dtype, tensor.layout, tensor.shape
    if tensor.layout is not torch.strided:
        return *place, id(tensor)
    return *place, tensor.data_ptr(), tensor.stride()
