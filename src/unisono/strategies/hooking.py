"""How a program lets a communication hook reduce gradients."""

from __future__ import annotations

import functools
import threading
import weakref
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from unisono.errors import ContextError, UnsupportedError
from unisono.gradients import GradientReducer
from unisono.gradients.replica_hooks import ReplicaHooks
from unisono.hooks import WorkersGroup
from unisono.hooks.hook import CommHook, HookFunction
from unisono.options import ReduceOp
from unisono.reductions import CrossDeviceOps, Workers
from unisono.variables import Mirrors, watch_torch

if TYPE_CHECKING:
    from unisono.strategies.elastic_job import ElasticJob


# The hooks of open strategies, the newest last.
_registered: list[weakref.ref[CommHook | ReplicaHooks]] = []


def newest_hook() -> CommHook | ReplicaHooks | None:
    """Returns the hook that this process has registered last with a strategy that is open."""
    return next((found for one in reversed(_registered) if (found := one()) is not None), None)


class HookMethods:
    """The part of an extension that is about communication hooks."""

    if TYPE_CHECKING:
        elastic: ElasticJob | None
        workers: Workers
        mirrors: Mirrors
        reduce_gradients: ReduceOp
        gradients: GradientReducer
        _hook: CommHook | ReplicaHooks | None
        _local_ops: CrossDeviceOps
        _num_intraop: int | None
        _run_lock: AbstractContextManager[Any]

        def _reducer(self) -> GradientReducer:
            """See `StrategyExtended._reducer`."""

    @functools.cached_property
    def process_group(self) -> WorkersGroup:
        """The workers as a process group of torch."""
        return WorkersGroup(None if self.elastic is not None else self.workers.communicator)

    @property
    def has_hook(self) -> bool:
        """Whether gradients pass through a communication hook."""
        return self._hook is not None

    @property
    def replica_hooks(self) -> ReplicaHooks | None:
        """The communication hooks of the replicas, if each has its own."""
        return self._hook if isinstance(self._hook, ReplicaHooks) else None

    def register_comm_hook(self, state: object, hook: HookFunction) -> None:
        """Lets `hook` reduce gradients; see `Strategy.register_comm_hook`."""
        if self.has_hook:
            raise ContextError(
                "The strategy already has a communication hook. Register one hook that does both."
            )
        if self.mirrors.is_in_use:
            raise ContextError(
                "A communication hook was registered after a model or variable was made in the "
                "scope. Call `register_comm_hook()` right after making the strategy."
            )
        if self.reduce_gradients not in (ReduceOp.MEAN, ReduceOp.SUM):
            raise UnsupportedError(
                "A communication hook computes the mean or sum of gradients, but "
                f"`reduce_gradients` is {self.reduce_gradients}. Use MEAN or SUM."
            )
        state = self.process_group if state is None else state
        # Only with `num_replicas`, results must not depend on who has which replicas.
        if self._num_intraop is not None:
            self._hook = self._of_replicas(state, hook)
        else:
            communicator = self.workers.communicator
            who = f"worker {communicator.rank} of {communicator.size}"
            place = communicator.rank, communicator.size, self.mirrors.places[0]
            self._hook = CommHook(state, hook, who, *place)
        _registered.append(weakref.ref(self._hook))
        self.gradients = self._reducer()
        watch_torch()
        # A single replica, too, has its gradients pass through the hook.
        self.mirrors.is_single = False
        self.mirrors.is_in_use = True
        self._run_lock = threading.Lock()

    def _forget_hook(self) -> None:
        """When the strategy is closed: no checkpoint holds what its hook keeps any more."""
        _registered[:] = [one for one in _registered if one() not in (self._hook, None)]

    def _of_replicas(self, state: object, hook: HookFunction) -> ReplicaHooks:
        if self._local_ops.wants_all_gradients or not self._local_ops.is_tree_sum:
            raise UnsupportedError(
                f"{type(self._local_ops).__name__} combines the replicas of a worker, but with "
                "`num_replicas` a communication hook is called for each replica. Leave out "
                "`cross_device_ops`, `num_replicas`, or the hook."
            )
        hooks = ReplicaHooks(state, hook, self.process_group)
        if self.elastic is not None:
            hooks.take(self.elastic.of_hooks)
        return hooks
