"""The variables of an elastic job, whose workers may get other replicas while the program runs.

Of a variable with an aggregation, all workers have the same value. What replicas write for
themselves (`ON_READ`, or the aggregation `NONE`), all workers exchange at the end of the run, so
that another worker can go on with the component of a lost replica.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from unisono.devices import this_machine
from unisono.errors import UnsupportedError
from unisono.modules.leaves import VariableLeaves, fit_for_training, remember, with_own_gradients
from unisono.reductions import ReplicaLayout
from unisono.variables.writes import Write

if TYPE_CHECKING:
    from unisono.variables import Variable

# By the number of a variable, the components of a worker's replicas.
Components = Mapping[int, Sequence[Tensor]]


class KeptVariables:
    """The variables of one strategy, by a number that each has on all workers."""

    def __init__(self) -> None:
        self._variables: weakref.WeakValueDictionary[int, Variable] = weakref.WeakValueDictionary()
        self._num_made = 0
        # The components of all replicas after the last complete run, where they may differ.
        self._of_all: dict[int, list[Tensor]] = {}
        # Variables with components that other workers do not know.
        self._changed: set[int] = set()
        # In a run: which of them there were before, and what components were before a write.
        self._before: tuple[int, set[int]] | None = None
        self._copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def add(self, variable: Variable, like: Variable | None = None) -> int:
        """Returns the number of a new variable, which may be a copy of another."""
        number, self._num_made = self._num_made, self._num_made + 1
        self._variables[number] = variable
        if like is not None and (of_all := self._of_all.get(like._number)) is not None:
            self._of_all[number] = [one.clone() for one in of_all]
        if like is not None and like._number in self._changed:
            self._changed.add(number)
        return number

    def _each(self) -> Iterator[tuple[int, Variable]]:
        return iter(list(self._variables.items()))

    def begin(self) -> None:
        """Before a run."""
        for number in self._of_all.keys() - self._variables.keys():
            del self._of_all[number]
        self._before = self._num_made, set(self._changed)
        self._copies = {}

    def end(self, *, is_complete: bool) -> None:
        """After a run. If it has failed, nobody knows what other workers have written."""
        self._before, self._copies = None, {}
        if not is_complete:
            self._changed.update(number for number, one in self._each() if not one.is_mirrored)

    def before_write(
        self, variable: Variable, replica_ids: Sequence[int], *, is_known: bool = False
    ) -> None:
        """Before components are written to, each by one thread.

        Unless it `is_known`, other workers do not know what is written.
        """
        number, is_own = variable._number, not (variable.is_mirrored or is_known)
        if is_own and variable._is_trained:
            raise UnsupportedError(
                f"A replica writes to its own component of {variable.name!r}, which is trainable. "
                "With `elastic=True`, make the variable with `trainable=False`, or with an "
                "`aggregation`."
            )
        if self._before is not None:
            for replica_id in replica_ids:
                if (number, replica_id) not in self._copies:
                    component = variable.values[replica_id]
                    kept = component, component.detach().clone()
                    self._copies[number, replica_id] = kept
        if is_own or (self._before is not None and not variable.is_mirrored):
            self._changed.add(number)

    def restore(self) -> None:
        """Makes everything what it was before the run."""
        assert self._before is not None
        num_made, changed = self._before
        if self._num_made > num_made:
            raise UnsupportedError(
                "A worker was lost, and the run cannot be made again, because it makes a "
                "`Variable`. Make variables before `run`, in the scope."
            )
        with fit_for_training():
            for component, kept in self._copies.values():
                component.detach().copy_(kept)
        self._copies, self._changed = {}, set(changed)

    def told(self) -> Components:
        """At the end of a run: returns what other workers do not know."""
        return {
            number: [one.detach() for one in variable.values]
            for number, variable in self._each()
            if number in self._changed
        }

    def settle(self, rows: Sequence[Components], layout: ReplicaLayout) -> None:
        """When all workers know what `told` has returned on each, by rank."""
        for number, variable in self._each():
            # Before the first run that has written to them, all were like the first.
            _, first = self._copies.get((number, 0), (None, variable.values[0].detach()))
            for own, row in zip(layout.ranges, rows, strict=True):
                if number in row:
                    if number not in self._of_all:
                        self._of_all[number] = [first.to("cpu", copy=True)] * layout.total
                    kept = [one.to("cpu") for one in row[number]]
                    self._of_all[number][own.start : own.stop] = kept
        self._changed.difference_update(*(row.keys() for row in rows))

    def known(self, variable: Variable) -> tuple[Tensor, ...] | None:
        """Returns the components of all replicas, if all workers know them now."""
        if self._before is not None or variable._number in self._changed:
            return None
        total = variable._replicas.num_replicas_in_sync
        of_all = self._of_all.get(variable._number)
        return tuple(of_all or [variable.values[0].detach().cpu()] * total)

    def write_all(self, variable: Variable, write: Write, shares: Sequence[Tensor]) -> None:
        """When `shares` are written for all replicas of all workers."""
        if variable.is_mirrored or variable._number in self._changed:
            return
        of_all = self._of_all.get(variable._number)
        if all(one is shares[0] for one in shares) and (write is Write.ASSIGN or not of_all):
            self._of_all.pop(variable._number, None)
        elif write is Write.ASSIGN:
            self._of_all[variable._number] = [one.to("cpu", copy=True) for one in shares]
        elif of_all is not None:
            # Several entries may be one tensor.
            changed = [one.clone() for one in of_all]
            for one, share in zip(changed, shares, strict=True):
                write.apply(one, share.to("cpu"))
            self._of_all[variable._number] = changed

    def check(self, *, has_unreduced: bool) -> None:
        """Raises if a replica has what only its worker knows."""
        for number, variable in self._each():
            if number in self._changed:
                raise UnsupportedError(
                    f"Replicas have written to {variable.name!r}, a `Variable` with a component "
                    "per replica, in a run that failed or with `extended.update()` outside `run`. "
                    "So no other worker can take over their components. Write to it in a run."
                )
            leaves = variable._replicas.mirrors.leaves_of(variable.values[0])
            if has_unreduced and leaves is not None and with_own_gradients([leaves]):
                raise UnsupportedError(
                    f"A gradient of {variable.name!r} was not reduced in its run, so no other "
                    "worker can take over the replica that has it. Leave `no_sync()` before the "
                    "last backward pass of a run."
                )

    def relayout(self) -> None:
        """When this worker has got other replicas: gives them their components."""
        for number, variable in self._each():
            replicas, first = variable._replicas, variable.values[0]
            variable._devices = devices = replicas.worker_devices
            variable._owner_of = variable._owners(devices)
            places = [this_machine().torch_device(device) for device in devices]
            with fit_for_training():
                storages = {i: first.detach().to(places[i], copy=i > 0) for i in variable.owners}
                # The first component stays the same object: an optimizer may have it.
                variable._values = (first, *variable._aliases(storages)[1:])
                own = self._of_all.get(number, ())[replicas.first_replica_id :][: len(devices)]
                for component, given in zip(variable._values, own, strict=False):
                    component.detach().copy_(given)
            remember(variable)
            if variable._is_trained:
                leaves = VariableLeaves(variable, variable._values, variable._owner_of)
                replicas.mirrors.add(leaves)
                if id(first) in replicas.mirrors.showing:
                    replicas.mirrors.showing.discard(id(first))
                    leaves.give_gradient()

    def state(self) -> dict[int, list[Tensor]]:
        """Returns what a worker that joins needs to know."""
        return {
            number: self._of_all.get(number) or [variable.values[0].detach()]
            for number, variable in self._each()
        }

    def take(self, state: Mapping[int, Sequence[Tensor]]) -> None:
        """Takes over what `state` has returned on another worker."""
        for number, variable in self._each():
            if number not in state:
                continue
            of_all, first = list(state[number]), variable._replicas.first_replica_id
            is_alike = len(of_all) == 1
            if not is_alike:
                self._of_all[number] = of_all
            with fit_for_training():
                for i, component in enumerate(variable.values):
                    component.detach().copy_(of_all[0 if is_alike else first + i])
        self._num_made = max(self._num_made, *(number + 1 for number in state), 0)
