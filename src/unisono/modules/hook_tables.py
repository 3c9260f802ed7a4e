"""Hooks that a step registers or removes: each replica has its own.

Clones of a module share its tables of hooks. Before a replica registers or removes a hook in a
step, its clone gets copies of these tables. What it registers stays in its copies until it is
removed, as attributes of a clone do. A hook from outside that a replica removes is gone for this
replica at once, and for the program when the run ends.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from unisono.contexts import ReplicaContext, current_replica
from unisono.modules.attributes import raw
from unisono.sharing import computed_once, in_place_of
from unisono.torch_private import no_torch_function

if TYPE_CHECKING:
    from unisono.modules.front import Mirror
    from unisono.modules.mirrors import Mirrors

_TABLES = [name for name, held in vars(nn.Module()).items() if type(held) is OrderedDict]
_REGISTER = [name for name in vars(nn.Module) if "register_" in name and name.endswith("_hook")]


class HookTables:
    """The hooks of the modules of one strategy that only one replica has."""

    def __init__(self, mirrors: Mirrors) -> None:
        self._mirrors = mirrors
        # By the identity of a clone: the clone, whose it is, and by table the hooks it was given.
        self._parted: dict[int, tuple[nn.Module, Mirror, dict[str, set[int]]]] = {}
        self._by_identity: dict[int, Mirror] | None = None
        # Tables of the program, and the hooks that replicas have removed from them.
        self._removed: list[tuple[Any, int]] = []

    def part(self, mirror: Mirror, replica_id: int) -> dict[str, Any]:
        """Returns the attributes of a clone, which has its own tables from now on."""
        clone = mirror.replicas[replica_id]
        held = raw(clone)
        if id(clone) not in self._parted:
            given = {name: set(held[name]) for name in _TABLES}
            held.update({name: held[name].copy() for name in _TABLES})
            self._parted[id(clone)] = clone, mirror, given
        return held

    def register(self, module: nn.Module, replica_id: int) -> None:
        """Before a replica registers a hook: parts the tables of a module, unless it is new."""
        mirror = self._known().get(id(module))
        if mirror is not None and module in (mirror.replicas[replica_id], mirror.primary()):
            self.part(mirror, replica_id)

    def remove(self, handle: RemovableHandle, context: ReplicaContext) -> bool:
        """Removes a hook of the program on one replica, for now; False if it is not one."""
        table: Any = handle.hooks_dict_ref()
        mirror = self._known().get(id(table))
        module = None if mirror is None else mirror.primary()
        if mirror is not None and module is not None:
            held = self.part(mirror, context.local_id)
            for name in _TABLES:
                held[name].pop(handle.id, None)
                self._removed.append((raw(module)[name], handle.id))
            return True
        for one in self._mirrors.all_leaves:
            if one.hooks and table is one.primary._backward_hooks:
                own: Any = one.leaves[context.local_id]._backward_hooks
                own.pop(handle.id, None)
                self._removed.append((table, handle.id))
                return True
        return False

    def _known(self) -> dict[int, Mirror]:
        """Returns modules, their clones and their tables, by identity."""
        known = self._by_identity
        if known is None:
            known = {}
            for mirror in list(self._mirrors.mirrors.values()):
                module = mirror.primary()
                if module is not None and mirror.replicas:
                    tables = (raw(module)[name] for name in _TABLES)
                    found = map(id, (module, *mirror.replicas, *tables))
                    known |= dict.fromkeys(found, mirror)
            # As a whole, because other replicas may look for theirs.
            self._by_identity = known
        return known

    def forget(self) -> None:
        """When there are other modules, or tables."""
        self._by_identity = None

    def settle(self) -> None:
        """After a run: removes what replicas have removed."""
        removed, self._removed = self._removed, []
        for table, number in removed:
            table.pop(number, None)

    def refresh(self) -> None:
        """Before a run: gives clones what was registered or removed outside since the last one."""
        for clone, mirror, given in list(self._parted.values()):
            module, held = mirror.primary(), raw(clone)
            if module is None or all(clone is not one for one in mirror.replicas):
                del self._parted[id(clone)]
                continue
            tables = {name: raw(module)[name] for name in _TABLES}
            # Those of a replica without samples were put back.
            is_back = any(held[name] is table for name, table in tables.items())
            if is_back or all(held[name].keys() <= given[name] for name in _TABLES):
                held.update(tables)
                del self._parted[id(clone)]
                continue
            for name, table in tables.items():
                own = held[name]
                for number in given[name] - table.keys():
                    own.pop(number, None)
                own.update((number, table[number]) for number in table.keys() - own.keys())
                given[name] = set(table)


@computed_once
def let_replicas_have_hooks() -> None:
    """From now on, what replicas register and remove in a step is their own."""
    for name in _REGISTER:
        _wrap_register(name, getattr(nn.Module, name))
    remove = RemovableHandle.remove

    @in_place_of(RemovableHandle, "remove")
    def wrapped(self: RemovableHandle) -> None:
        context = current_replica()
        if context is not None and not context.replicas.mirrors.is_single:
            with no_torch_function():
                if context.replicas.mirrors.hooks.remove(self, context):
                    return
        remove(self)


def _wrap_register(name: str, register: Any) -> None:
    @in_place_of(nn.Module, name)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        context = current_replica()
        if context is not None and not context.replicas.mirrors.is_single:
            context.replicas.mirrors.hooks.register(self, context.local_id)
        return register(self, *args, **kwargs)
