"""What is trained: a parameter or a variable once, and a leaf of it for every replica."""

from __future__ import annotations

import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from unisono.kernels import in_memory_order
from unisono.packing import PackLayout, Spec
from unisono.torch_private import data_of_tensors, set_grad_enabled
from unisono.values import version_of

if TYPE_CHECKING:
    from unisono.variables import Variable

# A copy of so many bytes takes the GPU longer than it takes the host to start it.
_MOST_BYTES_PACKED = 1 << 18
# The variables of components.
_variables: WeakIdKeyDictionary = WeakIdKeyDictionary()


_set_data: Callable[[Tensor, Tensor], None] = data_of_tensors.__set__
gradient_of = operator.attrgetter("grad")
needs_grad = operator.attrgetter("requires_grad")


class Mark(NamedTuple):
    """A gradient as it was: another one in its place, or a write to it, can be seen."""

    grad: weakref.ref[Tensor]
    version: int

    @classmethod
    def of(cls, grad: Tensor | None) -> Mark | None:
        """Marks a gradient."""
        if grad is None:
            return None
        # Without a call of Python, as there is one for every gradient.
        return tuple.__new__(cls, (weakref.ref(grad), grad._version))

    def fits(self, grad: Tensor) -> bool:
        """Whether `grad` is the gradient that was marked, and has not been written to."""
        return self.grad() is grad and grad._version == self.version


class Leaves:
    """One parameter: the primary, and the leaf of each replica."""

    __slots__ = (
        *("__weakref__", "attributes", "hooks", "is_shown", "is_spread", "leaves", "memories"),
        *("others", "primary", "reduced", "version"),
    )

    def __init__(
        self,
        primary: nn.Parameter,
        leaves: Sequence[nn.Parameter],
        memories: tuple[Hashable, ...],
    ) -> None:
        self.primary = primary
        self.leaves = list(leaves)
        self.memories = memories
        self.version = version_of(primary)
        # The first leaf in each memory other than the primary's, and whether there is one.
        self.others = [leaves[memories.index(one)] for one in dict.fromkeys(memories)][1:]
        self.is_spread = bool(self.others)
        # Whether the primary has shown the gradient of the leaves since they last had none.
        self.is_shown = False
        # The program's attributes of the primary, and the numbers of its hooks, that leaves have.
        self.attributes: dict[str, Any] = {}
        self.hooks: list[int] = []
        # For each replica, the gradient that was reduced last.
        self.reduced: list[Mark | None] = [None] * len(self.leaves)

    @classmethod
    def made_for(
        cls, primary: nn.Parameter, memories: tuple[Hashable, ...], places: Sequence[torch.device]
    ) -> Leaves:
        """Makes a leaf for each replica, which shares the storage of those in its memory."""
        storages = _storages(primary, memories, places)
        needs, kind = primary.requires_grad, primary.__class__
        leaves = [nn.Parameter(storage, requires_grad=needs) for storage in storages]
        if kind is not nn.Parameter and type(leaves[0]) is nn.Parameter:
            for leaf in leaves:
                leaf.__class__ = kind
        return cls(primary, leaves, memories)

    def is_current(self) -> bool:
        """Whether the leaves still are what the primary is: `p.data = ...` moves it away."""
        first, primary = self.leaves[0], self.primary
        return (
            first.data_ptr() == primary.data_ptr()
            and first.requires_grad == primary.requires_grad
            and first.shape == primary.shape
        )

    def follow(self, places: Sequence[torch.device]) -> None:
        """Makes the leaves again what the primary is. They keep their gradients and hooks."""
        primary = self.primary
        storages = _storages(primary, self.memories, places)
        for leaf, storage in zip(self.leaves, storages, strict=True):
            grad, leaf.grad = leaf.grad, None
            _set_data(leaf, storage)
            leaf.requires_grad_(primary.requires_grad)
            if grad is not None and grad.shape == leaf.shape:
                # As `model.half()` does, which converts gradients, too.
                leaf.grad = grad.to(leaf.dtype)
        self.version = version_of(primary)

    def is_behind(self) -> bool:
        """Whether something was written to the primary that other memories do not have."""
        return self.is_spread and self.version != version_of(self.primary)

    def take_over(self) -> None:
        """Gives the leaves what was written to the primary, its attributes and its hooks."""
        if self.is_behind():
            spread([self])
        attributes, given = vars(self.primary), self.attributes
        if attributes or given:
            changed = {k: v for k, v in attributes.items() if k not in given or given[k] is not v}
            for own in map(vars, self.leaves):
                for name in given.keys() - attributes.keys():
                    own.pop(name, None)
                own.update(changed)
            self.attributes = dict(attributes)
        hooks = self.primary._backward_hooks
        if hooks is not None and list(hooks) != self.hooks:
            for leaf in self.leaves:
                # A hook that a step registers on a leaf stays there.
                if leaf._backward_hooks is None:
                    leaf._backward_hooks = OrderedDict()
                for number in self.hooks:
                    leaf._backward_hooks.pop(number, None)
                leaf._backward_hooks.update(hooks)
            self.hooks = list(hooks)

    def mark_reduced(self) -> None:
        """Remembers the gradients of the leaves as reduced: they are equal."""
        self.reduced = [Mark.of(leaf.grad) for leaf in self.leaves]

    def is_hidden(self) -> bool:
        """Whether replicas have gradients of their own that the primary does not show."""
        is_first_shown = self.leaves[0].grad is self.primary.grad
        return any(map(self.is_own, range(is_first_shown, len(self.leaves))))

    def is_own(self, replica_id: int) -> bool:
        """Whether a replica has a gradient that is not the one that was reduced last."""
        grad, mark = self.leaves[replica_id].grad, self.reduced[replica_id]
        return grad is not None and (mark is None or not mark.fits(grad))

    def take_from_primary(self) -> None:
        """After something was done for all replicas: they get what became of the gradient."""
        if self.primary.grad is not self.leaves[0].grad or self.is_own(0):
            self.give_gradient()

    def give_gradient(self) -> None:
        """Gives all leaves the gradient of the primary, as one that is reduced."""
        grad = self.primary.grad
        for place, leaf in enumerate(self.leaves):
            if grad is None or place == 0:
                leaf.grad = grad
            elif leaf.grad is None or leaf.grad.layout is not torch.strided:
                leaf.grad = grad.to(leaf.device, copy=True)
            else:
                leaf.grad.detach().copy_(grad.detach())
        self.is_shown = grad is not None
        self.mark_reduced()

    def watched(self) -> list[Tensor]:
        """Returns one tensor for each memory, none of which a replica may write to by itself."""
        return [self.primary, *self.others]


def _storages(
    primary: Tensor, memories: tuple[Hashable, ...], places: Sequence[torch.device]
) -> list[Tensor]:
    """Returns what the leaf of each replica holds: in the memory of the primary, what that does."""
    storages: dict[Hashable, Tensor] = {memories[0]: primary.detach()}
    for memory, place in zip(memories, places, strict=True):
        if memory not in storages:
            storages[memory] = primary.detach().to(place, copy=True)
    return [storages[memory] for memory in memories]


class AnyVariable:
    """What every `Variable` is, by which others know one. Few programs load `Variable`."""

    __slots__ = ()


def is_variable(value: object) -> TypeGuard[Variable]:
    """Whether a value is a `Variable`."""
    return isinstance(value, AnyVariable)


class VariableLeaves(Leaves):
    """The components of a variable, which are leaves already; the first is the primary."""

    __slots__ = ("_variable",)

    def __init__(
        self, variable: object, components: Sequence[nn.Parameter], owner_of: tuple[int, ...]
    ) -> None:
        super().__init__(components[0], components, owner_of)
        self._variable = weakref.ref(variable)

    def is_current(self) -> bool:
        return self._variable() is not None

    def watched(self) -> list[Tensor]:
        """Returns nothing: replicas write to variables by `assign`, which says what that means."""
        return []

    def is_behind(self) -> bool:
        """Returns False: components may differ until the next update."""
        # Components may differ until the next update.
        return False

    def take_over(self) -> None:
        """Takes over nothing; see `is_behind`."""


def remember(variable: Variable) -> None:
    """Registers the components of a variable."""
    for component in variable.values:
        _variables[component] = weakref.ref(variable)


def variable_of(component: object) -> Variable | None:
    """Returns the variable of this component, if there is one."""
    found = _variables.get(component) if isinstance(component, Tensor) else None
    return None if found is None else found()


# A step calls each of the following once for all parameters. So none calls a function of Python for
# each parameter.


def show_gradients(owners: Iterable[Leaves]) -> None:
    """Lets the primaries show the gradients that the leaves have, which are reduced."""
    for one in owners:
        marks: list[Mark | None] = []
        for grad in map(gradient_of, one.leaves):
            # As `Mark.of`.
            mark = None if grad is None else (weakref.ref(grad), grad._version)
            marks.append(mark if mark is None else tuple.__new__(Mark, mark))
        one.primary.grad = one.leaves[0].grad
        one.reduced, one.is_shown = marks, True


def show_current_gradients(owners: Iterable[Leaves]) -> None:
    """Before something is done for all replicas: the primaries show what these have."""
    for one in owners:
        grad = one.leaves[0].grad
        if one.primary.grad is not grad:
            one.primary.grad = grad


def with_own_gradients(owners: Iterable[Leaves]) -> list[Leaves]:
    """Returns those of which a replica has a gradient that is not the one reduced last."""
    found = []
    for one in owners:
        for grad, mark in zip(map(gradient_of, one.leaves), one.reduced, strict=True):
            if grad is not None and (
                mark is None or mark[1] != grad._version or mark[0]() is not grad
            ):
                found.append(one)
                break
    return found


def clear_gradients(owners: Iterable[Leaves], replica_id: int, *, set_to_none: bool) -> None:
    """Clears the gradients of a replica: there is none, or one of zeros, which is the same.

    Those of the first replica are also what primaries show.
    """
    for one in owners:
        leaf = one.leaves[replica_id]
        if set_to_none:
            if replica_id == 0:
                one.primary.grad = None
                # Or the next run would clear gradients that stay on the replicas for now.
                one.is_shown = False
            leaf.grad = one.reduced[replica_id] = None
            continue
        if replica_id == 0:
            clear(one.primary)
        clear(leaf)
        one.reduced[replica_id] = Mark.of(leaf.grad)


def hide_cleared(owners: Iterable[Leaves]) -> None:
    """After a run: primaries show no gradients that the replicas have cleared."""
    for one in owners:
        if one.is_shown and one.leaves[0].grad is None:
            one.primary.grad, one.is_shown = None, False


def catch_up(owners: Iterable[Leaves]) -> None:
    """Before a run: takes over what has been done to the primaries since the last one."""
    for one in owners:
        primary = one.primary
        has_more = primary.__dict__ or one.attributes or primary._backward_hooks is not None
        if one.is_spread or has_more:
            one.take_over()
        if one.is_shown:
            grad, mark = primary.grad, one.reduced[0]
            if grad is None or (
                mark is not None
                and (mark[0]() is not grad or mark[1] != grad._version)
                and not one.is_hidden()
            ):
                one.give_gradient()


def spread(owners: Sequence[Leaves]) -> None:
    """Copies primaries to the memories that have their own, small ones of a dtype end to end."""
    if not owners:
        return
    alike: dict[Hashable, list[Leaves]] = {}
    with fit_for_training():
        for one in owners:
            if one.is_spread and one.primary.nbytes <= _MOST_BYTES_PACKED:
                alike.setdefault(one.memories, []).append(one)
            elif one.is_spread:
                for leaf in one.others:
                    leaf.detach().copy_(one.primary.detach())
            one.version = version_of(one.primary)
        for small in alike.values():
            held = ([one.primary.detach(), *map(Tensor.detach, one.others)] for one in small)
            primaries, *others = zip(*map(in_memory_order, held), strict=True)
            layout = PackLayout.of_groups(list(map(Spec.of, primaries)), [range(len(small))])
            packs = layout.pack(primaries)
            for leaves in others:
                layout.write([pack.to(leaves[0].device) for pack in packs], leaves)


class fit_for_training:
    """What is made within the block is fit for training, also if the run it is made for is not."""

    __slots__ = ("_is_grad_enabled", "_mode")

    def __enter__(self) -> None:
        self._mode = torch._C._InferenceMode(False)  # noqa: FBT003
        self._mode.__enter__()
        self._is_grad_enabled = torch.is_grad_enabled()
        set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        set_grad_enabled(self._is_grad_enabled)
        self._mode.__exit__(None, None, None)


def clear(leaf: Tensor, *, set_to_none: bool = False) -> None:
    """Clears the gradient of one leaf, as torch does."""
    if set_to_none:
        leaf.grad = None
    elif leaf.grad is not None:
        leaf.grad.detach_().zero_()


def give_gradients(parameters: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Gives each tensor the gradient that stands in its place."""
    for parameter, grad in zip(parameters, grads, strict=True):
        if parameter.grad is not grad:
            parameter.grad = grad
