"""What replicas see, and change, of an optimizer's `param_groups` and `state`.

Every replica has a copy of the groups, so that `group["lr"] *= 0.5` on each of them halves the
learning rate once: where the replicas meet, what all of them have set to the same value is taken
over.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unisono.contexts import ReplicaContext, current_replica
from unisono.errors import ContextError, ReplicaMismatchError

if TYPE_CHECKING:
    from unisono.reductions import Workers
    from unisono.variables.mirrors import Mirrors

Groups = list[dict[str, Any]]


class GroupCopies:
    """The copies that the replicas of one run have of the groups of their optimizers."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        # Held while the state of an optimizer is replaced by what replicas see of it.
        self.lock = threading.Lock()
        self._copies: weakref.WeakKeyDictionary[Any, dict[int, Groups]] = (
            weakref.WeakKeyDictionary()
        )

    def seen(self, optimizer: Any, groups: Groups, context: ReplicaContext) -> Groups:
        """Returns what a replica sees of the groups of an optimizer."""
        copies = self._copies.setdefault(optimizer, {})
        if context.local_id not in copies:
            copies[context.local_id] = [_copied(group) for group in groups]
        return copies[context.local_id]

    def settle(self, num_replicas: int) -> None:
        """Where replicas meet: takes over what all of them have changed."""
        if not self._copies:
            return
        for optimizer, copies in list(self._copies.items()):
            groups: Groups = vars(optimizer)["param_groups"]
            changes = [_changes(optimizer, groups, copies.get(i)) for i in range(num_replicas)]
            if any(changes):
                self._check(optimizer, changes)
                for (number, key), value in changes[0].items():
                    kept = groups[number][key]
                    are_tensors = isinstance(kept, Tensor) and isinstance(value, Tensor)
                    if are_tensors and kept.shape == value.shape:
                        # A tensor may be known elsewhere, to a captured graph for example.
                        kept.detach().copy_(value)
                    else:
                        groups[number][key] = value

    def renew(self) -> None:
        """After something was done for all replicas: they see what has become of the groups."""
        if not self._copies:
            return
        for optimizer, copies in list(self._copies.items()):
            groups: Groups = vars(optimizer)["param_groups"]
            for own in copies.values():
                own[len(groups) :] = []
                for copy, group in zip(own, groups, strict=False):
                    copy.clear()
                    copy.update(_copied(group))
                own += [_copied(group) for group in groups[len(own) :]]

    def forget(self) -> None:
        """When the run has ended."""
        self._copies.clear()

    def _check(self, optimizer: Any, changes: list[dict[tuple[int, str], Any]]) -> None:
        for number, key in dict.fromkeys(place for own in changes for place in own):
            values = [own.get((number, key), _UNCHANGED) for own in changes]
            values += self._of_other_workers(values[0])
            if not all(_is_same(value, values[0]) for value in values[1:]):
                listed = ", ".join(map(str, values))
                raise ReplicaMismatchError(
                    f"The replicas set `param_groups[{number}][{key!r}]` of "
                    f"{type(optimizer).__name__} to different values: {listed}. Set the same value "
                    "on all replicas, or set it once with `unisono.once(fn)`."
                )

    def _of_other_workers(self, value: Any) -> list[Any]:
        if not self._workers.are_many or not isinstance(value, (int, float, Tensor)):
            return []
        own = torch.as_tensor(value, dtype=torch.float64, device="cpu").reshape(-1)
        gathered = self._workers.gather(own)
        if all(torch.equal(one, own) for one in gathered):
            return []
        return [one.tolist() for one in gathered]


class _Unchanged:
    def __str__(self) -> str:
        return "as it was"


_UNCHANGED = _Unchanged()


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else value
        for key, value in group.items()
    }


def _changes(optimizer: Any, groups: Groups, copies: Groups | None) -> dict[tuple[int, str], Any]:
    """Returns what one replica has changed, by the number of the group and the key."""
    if copies is None:
        return {}
    if len(copies) != len(groups) or any(
        own.keys() != group.keys() or own["params"] is not group["params"]
        for own, group in zip(copies, groups, strict=False)
    ):
        raise ContextError(
            f"The parameter groups of {type(optimizer).__name__} were changed on a replica. Change "
            "them outside `run`, or once for all replicas with `unisono.once(fn)`."
        )
    return {
        (number, key): own[key]
        for number, (own, group) in enumerate(zip(copies, groups, strict=True))
        for key, value in group.items()
        if own[key] is not value and not _is_same(own[key], value)
    }


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other.to(one.device))
    return type(one) is type(other) and bool(one == other)


class SeenState(defaultdict[Any, Any]):
    """The state of an optimizer, which a replica finds under its own parameters, too."""

    def __init__(self, state: dict[Any, Any], mirrors: Mirrors) -> None:
        super().__init__(dict, state)
        self._mirrors = weakref.ref(mirrors)

    def _key(self, key: Any) -> Any:
        mirrors = self._mirrors()
        if mirrors is None or not isinstance(key, Tensor) or current_replica() is None:
            return key
        return mirrors.of_program(key)

    def __missing__(self, key: Any) -> Any:
        primary = self._key(key)
        return super().__missing__(key) if primary is key else self[primary]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._key(key))

    def get(self, key: Any, default: Any = None) -> Any:
        """Returns the state of a parameter, or `default` if it has none."""
        return super().get(self._key(key), default)

    def __reduce__(self) -> Any:
        """Copies and pickles are of the plain class, as torch makes it."""
        return defaultdict, (dict,), None, None, iter(self.items())
