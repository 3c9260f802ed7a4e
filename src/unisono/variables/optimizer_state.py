"""The state of an optimizer as replicas see it: they share it, and only updates write to it."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from unisono.contexts import current_replica
from unisono.errors import ContextError
from unisono.values import version_of
from unisono.variables.attributes import are_same

if TYPE_CHECKING:
    from unisono.variables.mirrors import Mirrors


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


_lock = threading.Lock()


def seen_state(optimizer: Any, mirrors: Mirrors) -> SeenState:
    """Returns the state of an optimizer. The watch will see what a replica writes to it."""
    with _lock:
        # Another replica may have been faster. What is written to its object must be seen here.
        state = vars(optimizer)["state"]
        if not isinstance(state, SeenState):
            state = vars(optimizer)["state"] = SeenState(state, mirrors)
        states, context = mirrors.watch.states, current_replica()
        is_shared = context is not None and context.num_local_replicas > 1
        if is_shared and id(optimizer) not in states:
            states[id(optimizer)] = StateNote(optimizer)
    return state


class StateNote:
    """What the state of an optimizer holds. All replicas would write there, so a sum is wrong."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._held, self._versions = self._now()

    def check(self) -> None:
        """Raises if it holds something else now."""
        held, versions = self._now()
        if versions != self._versions or not are_same(held, self._held):
            raise ContextError(
                f"A step wrote to the state of {type(self._optimizer).__name__}, which all "
                "replicas share, so the state is wrong now: load it from a checkpoint. Write once "
                "for all replicas with `unisono.once`, for example "
                '`unisono.once(lambda: optimizer.state[p]["step"].zero_())`.'
            )

    def _now(self) -> tuple[list[Any], list[int]]:
        held: list[Any] = []
        for own in vars(self._optimizer)["state"].values():
            # To read the state of a parameter that has none makes an empty table.
            held += (*own, *own.values()) if isinstance(own, dict) else (own,)
        return held, [version_of(one) for one in held]
