"""What a step must leave as it is: which parameters and submodules the modules have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.errors import ContextError
from unisono.variables.attributes import Contents, raw
from unisono.variables.leaves import fit_for_training
from unisono.variables.names import name_of

if TYPE_CHECKING:
    from unisono.variables.mirrors import Mirrors

_TABLES = ("_parameters", "_modules")


class Parts:
    """The parameters and submodules of the clones of one strategy.

    A replica that sets one in a step has it alone: no other replica, no optimizer and no checkpoint
    would know of it.
    """

    def __init__(self, mirrors: Mirrors) -> None:
        self._mirrors = mirrors
        self._given = Contents()

    def note(self) -> None:
        """Notes what the clones were given."""
        replica_ids = range(len(self._mirrors.clones))
        clones = [clone for _, clone in self._mirrors.clones_of(replica_ids)]
        self._given.note([raw(clone)[table] for clone in clones for table in _TABLES])

    def check(self) -> None:
        """After a run: refuses what was set in it, and takes over `requires_grad`."""
        if not self._given.are_same():
            self._mirrors.is_stale = True
            raise ContextError(
                f"{self._changed()} was set on a replica, so it would be neither reduced nor "
                "saved. Set it outside `run`; if the first call makes layers, call the model once "
                "before `run`."
            )
        for one in self._mirrors.all_leaves:
            found = {leaf.requires_grad for leaf in one.leaves}
            if found == {one.primary.requires_grad}:
                continue
            wanted = one.leaves[0].requires_grad
            if len(found) > 1:
                self._mirrors.is_stale = True
                for leaf in one.leaves:
                    leaf.requires_grad_(one.primary.requires_grad)
                raise ContextError(
                    f"The parameter {name_of(self._mirrors, one.primary)} is trained on some "
                    "replicas and frozen on others after a step. Call `requires_grad_()` on all "
                    "replicas, or outside `run`."
                )
            with fit_for_training():
                one.primary.requires_grad_(wanted)
            self._mirrors.is_stale = True

    def _changed(self) -> str:
        """Names the first parameter or submodule that is another than it was."""
        for i in range(len(self._mirrors.clones)):
            for module, clone in self._mirrors.clones_of([i]):
                for table in _TABLES:
                    found, before = raw(clone)[table], raw(module)[table]
                    name = _other(found, before, self._mirrors, i)
                    if name is not None:
                        return f"`{type(clone).__name__}.{name}`"
        return "A parameter or submodule"


def _other(found: dict[str, Any], before: dict[str, Any], mirrors: Mirrors, i: int) -> str | None:
    for name in [*found, *before]:
        given = before.get(name)
        own = mirrors.stand_ins[i].get(id(given), mirrors.clones[i].get(id(given), given))
        if found.get(name) is not own or (name in found) != (name in before):
            return name
    return None
