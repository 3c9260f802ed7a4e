"""Communication hooks of strategies: one for each worker, or one for each replica."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.communicators import IdentityCommunicator
from unisono.errors import ContextError, UnsupportedError
from unisono.hooks import WorkersGroup
from unisono.hooks.hook import CommHook, HookFunction
from unisono.options import ReduceOp
from unisono.sharing import LiveSet
from unisono.workers.across import AcrossWorkers
from unisono.workers.connected import ConnectedWorkers
from unisono.workers.exchange import WorkerExchange
from unisono.workers.replica_hooks import Hook, ReplicaHooks

if TYPE_CHECKING:
    from unisono.strategies.worker import WorkerReplicas

# The hooks of open strategies, the newest last.
hooks: LiveSet[Hook] = LiveSet()


def group_of(replicas: WorkerReplicas) -> WorkersGroup:
    """Returns the workers as a process group of torch."""
    return WorkersGroup(None if replicas.elastic is not None else _connected(replicas).communicator)


def made(replicas: WorkerReplicas, state: object, hook: HookFunction) -> Hook:
    """Returns a hook for a strategy; see `Strategy.register_comm_hook`."""
    if replicas.hook is not None:
        raise ContextError(
            "The strategy already has a communication hook. Register one hook that does both."
        )
    if replicas.mirrors.is_in_use:
        raise ContextError(
            "A communication hook was registered after a model or variable was made in the "
            "scope. Call `register_comm_hook()` right after making the strategy."
        )
    if replicas.reduce_gradients not in (ReduceOp.MEAN, ReduceOp.SUM):
        raise UnsupportedError(
            "A communication hook computes the mean or sum of gradients, but "
            f"`reduce_gradients` is {replicas.reduce_gradients}. Use MEAN or SUM."
        )
    state = replicas.process_group if state is None else state
    found: Hook
    # Only with `num_replicas`, results must not depend on who has which replicas.
    if replicas.threads_per_replica is not None:
        found = _of_replicas(replicas, state, hook)
    else:
        rank, size = replicas.workers.rank, replicas.workers.size
        who = f"worker {rank} of {size}"
        found = CommHook(state, hook, who, rank, size, replicas.mirrors.places[0])
    hooks.add(found)
    return found


def exchange_of(replicas: WorkerReplicas) -> WorkerExchange:
    """Returns what gradients pass through. Those of a single worker, too, do."""
    hook: Any = replicas.hook
    across = AcrossWorkers(replicas.local_ops, _connected(replicas), replicas.worker_devices)
    if isinstance(hook, ReplicaHooks):
        hook.lay_out(across, replicas.mirrors.places[0])
    op, options = replicas.reduce_gradients, replicas.options
    return WorkerExchange(replicas.mirrors, across, op, options, hook)


def _connected(replicas: WorkerReplicas) -> ConnectedWorkers:
    workers = replicas.workers
    if isinstance(workers, ConnectedWorkers):
        return workers
    return ConnectedWorkers(IdentityCommunicator())


def _of_replicas(replicas: WorkerReplicas, state: object, hook: HookFunction) -> ReplicaHooks:
    ops = replicas.local_ops
    if ops.wants_all_gradients or not ops.is_tree_sum:
        raise UnsupportedError(
            f"{type(ops).__name__} combines the replicas of a worker, but with "
            "`num_replicas` a communication hook is called for each replica. Leave out "
            "`cross_device_ops`, `num_replicas`, or the hook."
        )
    found = ReplicaHooks(state, hook, replicas.process_group)
    if replicas.elastic is not None:
        found.take(replicas.elastic.of_hooks)
    return found
