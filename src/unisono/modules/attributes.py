"""The attributes of a module on each replica: every replica has its own containers."""

from __future__ import annotations

import copy
import copyreg
import itertools
import operator
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from unisono.errors import UnsupportedError
from unisono.kernels import native_core
from unisono.modules.metric_notes import is_metric, is_own

if TYPE_CHECKING:
    from unisono.modules.front import Mirror

# By name, the identity of an attribute of a module, and what replica 0 sees there.
Given = dict[str, tuple[int, Any]]

# Attributes of torch itself, such as hooks. Replicas share these.
TORCH_TABLES = frozenset(vars(nn.Module())) - {"training"}

TABLES_OF_OWN = ("_parameters", "_modules")
_KINDS: tuple[type, ...] = (list, OrderedDict, dict, set, deque)
# What recurrent layers of torch work out from their parameters.
_CACHES = frozenset({"_flat_weights", "_flat_weight_refs"})
_NOTHING = object()
# Of these, each replica sees another object.
_STAND_INS = (nn.Module, nn.Parameter, types.MethodType)


def raw(module: nn.Module) -> dict[str, Any]:
    """Returns the module's own attributes, also on a replica."""
    attributes: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return attributes


class Contents:
    """A snapshot of the contents of some containers."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Notes nothing. Objects may ask for it when Python has cleared our modules at its end."""
        self._noted: tuple[list[Any], bytes, list[Any], bytes] = [], b"", [], b""

    def note(self, containers: Sequence[Any]) -> None:
        """Notes what lists, sets, dicts (keys and values) and live views of dicts hold now."""
        found: list[Any] = []
        for one in containers:
            # The table inside does not know the order of an ordered dict.
            found += [one.keys(), one.values()] if isinstance(one, OrderedDict) else [one]
        lengths = array("q", map(len, found))
        held = list(itertools.chain.from_iterable(map(_held_in, found)))
        addresses = array("Q", map(id, held)).tobytes()
        # Kept as long as they are compared, so that no others have these addresses.
        self._noted = found, lengths.tobytes(), held, addresses

    def are_same(self) -> bool:
        """Whether they still hold the same objects. C compares them, as there may be thousands."""
        containers, lengths, held, addresses = self._noted
        hold_same = native_core().hold_same
        if hold_same is not None:
            return hold_same(containers, lengths, addresses)
        now = itertools.chain.from_iterable(map(_held_in, containers))
        return array("q", map(len, containers)).tobytes() == lengths and all(
            map(operator.is_, now, held)
        )


def _held_in(container: Any) -> Iterable[Any]:
    is_dict = isinstance(container, dict)
    return itertools.chain.from_iterable(container.items()) if is_dict else container


def parts_of(container: Any) -> list[Any]:
    """Returns what a container holds; of a dict its keys, then its values."""
    is_dict = isinstance(container, dict)
    return [*container, *container.values()] if is_dict else list(container)


def refill(container: Any, parts: Sequence[Any]) -> None:
    """Makes a list, dict, set or deque hold what `parts_of` has returned."""
    kind: Any = next(kind for kind in _KINDS if isinstance(container, kind))
    kind.clear(container)
    if issubclass(kind, dict):
        half = len(parts) // 2
        kind.update(container, zip(parts[:half], parts[half:], strict=True))
    else:
        (kind.update if kind is set else kind.extend)(container, parts)


@dataclass(eq=False)
class _Copied:
    """A container of a module, and the copy that each replica has of it."""

    original: Any
    copies: list[Any]
    # What it held when the copies were last filled, and what replica 0 was given of it.
    content: list[Any] = field(default_factory=list)
    firsts: list[Any] = field(default_factory=list)


class Attributes:
    """Makes what replicas see in place of the values that a module holds.

    Lists, dicts, sets and deques are copied for each replica, also inside one another. One that is
    held in two places is one copy per replica, too. A replica's changes stay in its copy until the
    module's own container changes.
    """

    def __init__(self, num_replicas: int, stand_in: Callable[[Any, int], Any]) -> None:
        self._num_replicas = num_replicas
        self._stand_in = stand_in
        # By identity, the containers, and those that have been looked at in this round.
        self._known: dict[int, _Copied] = {}
        self._visited: dict[int, _Copied] = {}
        self._changed: set[int] = set()
        # What all containers held when the replicas were given their copies.
        self.given = Contents()
        # By identity, tensors that replicas share because a module has them as plain attributes,
        # and what they are called. And the attribute that is looked at.
        self.tensors: dict[int, tuple[Tensor, str]] = {}
        self._looked_at = ""

    def give(self, mirrors: Iterable[Mirror]) -> None:
        """Gives the clones of modules the attributes of their primaries."""
        self._visited, self.tensors = {}, {}
        known = self._known.items()
        self._changed = {k for k, x in known if not are_same(parts_of(x.original), x.content)}
        for mirror in mirrors:
            module = mirror.primary()
            if module is not None:
                mirror.given = self._give(module, mirror.replicas, mirror.given)
        # Those that no module has any more are forgotten.
        self._known = self._visited
        self.given.note([one.original for one in self._known.values()])

    def _give(self, module: nn.Module, clones: Sequence[nn.Module], given: Given) -> Given:
        """Gives the clones of a module its attributes, and returns which they are."""
        now: Given = {}
        attributes, slots = raw(module), _slots(module)
        for name, value in (*attributes.items(), *slots.items()):
            if name == "_buffers" or is_own(attributes, name):
                continue
            if name in TABLES_OF_OWN:
                seen = [dict(zip(value, own, strict=True)) for own in self._own(value.values())]
            else:
                self._looked_at = f"`{name}` of {type(module).__name__}"
                is_shared = name in TORCH_TABLES
                seen = [value] * self._num_replicas if is_shared else self._seen(value)
            now[name] = (id(value), seen[0])
            before = given.get(name)
            is_known = before is not None and before[0] == id(value) and before[1] is seen[0]
            if is_known and not self._is_changed(value):
                continue
            for clone, own in zip(clones, seen, strict=True):
                if name in slots:
                    object.__setattr__(clone, name, own)
                else:
                    clone.__dict__[name] = own
        for name in given.keys() - now.keys():
            for clone in clones:
                clone.__dict__.pop(name, None)
        return now

    def check_given(self, clones: Sequence[nn.Module], given: Given) -> None:
        """Raises if a replica has changed an attribute that no other worker has now."""
        copied = {id(one.copies[0]): one for one in self._known.values()}
        for i, clone in enumerate(clones):
            held = {**raw(clone), **_slots(clone)}
            if is_metric(held):
                continue
            for name in (held.keys() | given.keys()) - TORCH_TABLES - _CACHES:
                own, (identity, first) = held.get(name, _NOTHING), given.get(name, (1, _NOTHING))
                # Without an identity, the next run gives it to all replicas again.
                is_kept = identity and not (isinstance(own, Tensor) and own.grad_fn is not None)
                if is_kept and not _is_given(first, own, i, copied):
                    raise UnsupportedError(
                        f"A step has changed the attribute {name!r} of {type(clone).__name__}, and "
                        "each replica keeps its own value, so no other worker can take over a "
                        "replica. Make it a buffer, or return it from the step and pass it to the "
                        "next one."
                    )

    def _own(self, parts: Iterable[Any]) -> list[tuple[Any, ...]]:
        return list(zip(*map(self._seen, parts), strict=True)) or [()] * self._num_replicas

    def _seen(self, value: Any) -> list[Any]:
        """Returns what each replica sees in place of `value`."""
        if isinstance(value, _STAND_INS):
            return [self._stand_in(value, i) for i in range(self._num_replicas)]
        seen: list[Any] | None = None
        if isinstance(value, Tensor):
            self.tensors[id(value)] = value, self._looked_at
        elif isinstance(value, tuple):
            cls: Any = type(value)
            content = _content(value)
            own_parts: list[Any] = self._own(content)
            if not all(are_same(parts, content) for parts in own_parts):
                make = getattr(cls, "_make", None)
                seen = own_parts if cls is tuple else make and list(map(make, own_parts))
        elif isinstance(value, _KINDS):
            seen = self._copies(value)
        return [value] * self._num_replicas if seen is None else seen

    def _is_changed(self, value: Any) -> bool:
        """Whether `value` is or holds a container that has changed, in this round."""
        if isinstance(value, tuple):
            return any(map(self._is_changed, _content(value)))
        return id(value) in self._changed

    def _copies(self, value: Any) -> list[Any] | None:
        """Returns copies of a container; None if its class, one of the user's own, makes none."""
        key = id(value)
        if key in self._visited:
            return self._visited[key].copies
        one = self._known.get(key)
        if one is None:
            try:
                copies = [copy.copy(value) for _ in range(self._num_replicas)]
            except Exception:
                return None
            if any(made is value or type(made) is not type(value) for made in copies):
                return None
            one = _Copied(value, copies)
        self._visited[key] = one
        content = parts_of(value)
        own_parts = self._own(content)
        if any(map(self._is_changed, content)):
            self._changed.add(key)
        firsts = list(own_parts[0])
        if key in self._changed or not are_same(firsts, one.firsts):
            for copied, parts in zip(one.copies, own_parts, strict=True):
                refill(copied, parts)
        one.content, one.firsts = content, firsts
        return one.copies


def _is_given(first: Any, own: Any, replica: int, copied: dict[int, _Copied]) -> bool:
    """Whether a replica still has what it was given together with what replica 0 was given."""
    if isinstance(first, _STAND_INS):
        return isinstance(own, _STAND_INS)
    container = copied.get(id(first))
    if container is not None:
        firsts = container.firsts
        if own is not container.copies[replica]:
            return False
        if isinstance(own, set):
            plain = [one for one in firsts if not isinstance(one, _STAND_INS)]
            return len(own) == len(firsts) and own.issuperset(plain)
        parts = parts_of(own)
    elif isinstance(first, tuple) and isinstance(own, tuple):
        firsts, parts = _content(first), _content(own)
    else:
        return own is first
    return len(firsts) == len(parts) and all(
        _is_given(one, part, replica, copied) for one, part in zip(firsts, parts, strict=True)
    )


def _content(value: tuple[Any, ...]) -> list[Any]:
    # A class may have forbidden `len`, which `list` asks.
    return list(tuple.__iter__(value))


def _slots(module: nn.Module) -> dict[str, Any]:
    names: list[str] = copyreg._slotnames(type(module))  # type: ignore[attr-defined]
    held = {}
    for name in names:
        with suppress(AttributeError):
            held[name] = object.__getattribute__(module, name)
    return held


def are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists hold the very same objects, in the same order."""
    return len(some) == len(others) and all(map(operator.is_, some, others))
