"""The state of an optimizer as replicas see it: they share it, and only updates write to it."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from unisono.contexts import ReplicaContext, current_replica
from unisono.errors import ContextError
from unisono.modules.attributes import Contents, are_same
from unisono.modules.optimizer_tables import tables_in, tensors_in
from unisono.values import version_of

if TYPE_CHECKING:
    from unisono.modules.mirrors import Mirrors


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


class SeenStates:
    """The states of optimizers that the replicas of one run have looked at.

    What one of them writes there, every other one writes too, so a sum would be wrong.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By the identity of an optimizer.
        self._noted: dict[int, _Noted] = {}

    def seen(self, optimizer: Any, mirrors: Mirrors, context: ReplicaContext | None) -> SeenState:
        """Returns the state of an optimizer. What a replica writes to it will be noticed."""
        with self._lock:
            # Another replica may have been faster. What is written to its object must be seen here.
            state = vars(optimizer)["state"]
            if not isinstance(state, SeenState):
                state = vars(optimizer)["state"] = SeenState(state, mirrors)
            is_shared = context is not None and context.num_local_replicas > 1
            if is_shared and id(optimizer) not in self._noted:
                self._noted[id(optimizer)] = _Noted(optimizer)
        return state

    def check(self) -> None:
        """Where replicas meet: raises if one has written to the state of an optimizer."""
        for noted in self._noted.values():
            noted.check()

    def forget(self) -> None:
        """After something was done for all replicas, or when the run has ended."""
        self._noted = {}


class _Noted:
    """What the state of an optimizer holds."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        state = vars(optimizer)["state"]
        self._tables = Contents()
        self._tables.note(tables_in(state))
        self._others = _others_in(state)
        self._num_filled = _num_filled(state)
        self._tensors = list(tensors_in(state))
        self._versions = list(map(version_of, self._tensors))

    def check(self) -> None:
        state = vars(self._optimizer)["state"]
        if not (
            self._tables.are_same()
            and are_same(self._others, _others_in(state))
            # To read the state of a parameter that has none makes an empty table.
            and self._num_filled == _num_filled(state)
            and self._versions == list(map(version_of, self._tensors))
        ):
            raise ContextError(
                f"A step wrote to the state of {type(self._optimizer).__name__}, which all "
                "replicas share, so the state is wrong now: load it from a checkpoint. Write once "
                "for all replicas with `unisono.once`, for example "
                '`unisono.once(lambda: optimizer.state[p]["step"].zero_())`.'
            )


def _others_in(state: dict[Any, Any]) -> list[Any]:
    return [value for value in state.values() if not isinstance(value, dict)]


def _num_filled(state: dict[Any, Any]) -> int:
    return sum(map(bool, tables_in(state)))
