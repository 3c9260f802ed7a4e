"""Modules that stand for a replica's own clone while replicas run."""

from __future__ import annotations

from typing import Any

from unisono.contexts import current_replica
from unisono.errors import ContextError
from unisono.variables.front import Front
from unisono.variables.mirror import mirror_of


class Redirect(Front):
    """Comes before the user's class in a primary module for as long as replicas run.

    In the thread of a replica, every attribute is that of the replica's clone: parameters,
    submodules, methods and `forward`, also through references that were kept before the run.
    Clones have the user's own class, so nothing is slower inside them. In other threads, and
    where code runs once for all replicas, the module is itself.
    """

    def __getattribute__(self, name: str) -> Any:
        clone = _clone(self)
        return super().__getattribute__(name) if clone is None else getattr(clone, name)

    def __setattr__(self, name: str, value: Any) -> None:
        clone = _clone(self)
        if clone is None:
            super().__setattr__(name, value)
        else:
            setattr(clone, name, value)

    def __delattr__(self, name: str) -> None:
        clone = _clone(self)
        if clone is None:
            super().__delattr__(name)
        else:
            delattr(clone, name)


def _clone(module: Any) -> Any:
    context = current_replica()
    if context is None:
        return None
    clone = context.replicas.mirrors.clones[context.local_id].get(id(module))
    if clone is None and mirror_of(module) is not None:
        raise ContextError(
            f"This {type(module).__name__} belongs to another strategy than {context.strategy!r}, "
            "so its replicas would share the parameters. Make it in the scope of the strategy that "
            "runs the step."
        )
    return clone
