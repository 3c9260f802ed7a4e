"""`MultiWorkerMirroredStrategy`: the devices of many workers, which train as one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono.arguments import check_bool, check_int, check_optional
from unisono.cluster import ClusterResolver, ClusterSpec, Membership, SimpleClusterResolver, detect
from unisono.cluster.elastic import ElasticMembers
from unisono.communicators import Communicator
from unisono.devices import Device, DeviceLike, replica_devices, spread
from unisono.errors import ClusterError, DeviceError, UnsupportedError
from unisono.options import (
    DEFAULT_OPTIONS,
    CommunicationImplementation,
    CommunicationOptions,
    ReduceOp,
)
from unisono.reductions import CrossDeviceOps, check_ops, dealt, select_cross_device_ops
from unisono.strategies.counting import Counting
from unisono.strategies.extended import StrategyExtended
from unisono.strategies.mirrored import replica_settings
from unisono.strategies.strategy import Strategy, T
from unisono.strategies.worker import memories_of
from unisono.workers.config import ConfigProto
from unisono.workers.connected import ConnectedWorkers
from unisono.workers.elastic import ElasticJob
from unisono.workers.joining import join, join_elastic, leave, led_by, local_devices
from unisono.workers.replica_hooks import ReplicaHooks

if TYPE_CHECKING:
    from unisono.checkpoints.checkpoint import Checkpoint
    from unisono.variables import Variable


class _Wishes(NamedTuple):
    """What a program has asked for. The workers may change later."""

    devices: tuple[Device, ...] | None
    num_replicas: int | None
    ops: CrossDeviceOps | None
    min_workers: int | None
    settings: dict[str, Any]


class MultiWorkerExtended(StrategyExtended):
    """Further methods of a strategy of many workers."""

    experimental_between_graph = True
    workers: ConnectedWorkers

    def __init__(
        self,
        wishes: _Wishes,
        resolver: ClusterResolver,
        options: CommunicationOptions,
        config: ConfigProto,
    ) -> None:
        membership = Membership.of(resolver)
        membership = led_by(membership, config.leader_rank(membership.spec))
        if config.timeout_seconds is not None:
            options = replace(options, timeout_seconds=config.timeout_seconds)
        own = _visible(wishes.devices, membership, config)
        members: ElasticMembers | None = None
        if wishes.min_workers is None or wishes.num_replicas is None:
            communicator, counts, tuning = join(membership, own, options, wishes.num_replicas)
        else:
            wanted = wishes.num_replicas, wishes.min_workers
            members, tuning = join_elastic(membership, own, options, *wanted)
            communicator = members.met.communicator
            counts = dealt(wishes.num_replicas, communicator.size)

        def make_ops(devices: tuple[Device, ...]) -> CrossDeviceOps:
            return wishes.ops or select_cross_device_ops(devices, tuning)

        devices = spread(own, counts[communicator.rank])
        self.workers = ConnectedWorkers(communicator, counts)
        super().__init__(
            devices,
            make_ops(devices),
            options=options,
            workers=self.workers,
            # Where an operator has more threads, it may add numbers up in another order.
            threads_per_replica=None if wishes.num_replicas is None else 1,
            tuning=tuning,
            **wishes.settings,
        )
        self.wishes = wishes
        self.resolver = resolver
        self.membership = membership
        if members is not None:
            self.elastic = ElasticJob(self, members, own, make_ops)
            self.elastic.begin()
            self.counting = Counting(self.worker_devices, self.workers, is_moving=True)

    @property
    def should_checkpoint(self) -> bool:  # type: ignore[override]
        """Whether this worker writes checkpoints: the chief does; of an elastic job, rank 0."""
        if self.elastic is not None:
            return self.workers.communicator.rank == 0
        return self.membership.is_chief

    should_save_summary = should_checkpoint

    @property
    def replica_hooks(self) -> ReplicaHooks | None:
        """The communication hooks of the replicas, if each has its own."""
        return self.hook if isinstance(self.hook, ReplicaHooks) else None

    def _make_run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.elastic is not None:
            return self.elastic.run(fn, args, kwargs)
        return self._run_step(fn, args, kwargs)

    def _reduce(self, op: ReduceOp, value: Any, destinations: Any, options: Any) -> Any:
        reduce = functools.partial(super()._reduce, op, value, destinations, options)
        if self.elastic is not None:
            return self.elastic.reduce(op, value, destinations, reduce)
        return reduce()

    def _gather(self, value: Any, axis: int) -> Any:
        if self.elastic is not None:
            return self.elastic.gather(value, axis, super()._gather)
        return super()._gather(value, axis)

    def _update(self, var: Variable, *args: Any, **kwargs: Any) -> Any:
        if self.elastic is not None:
            self.elastic.variables.before_write(var, var.owners)
        return super()._update(var, *args, **kwargs)

    def _relayout(
        self,
        devices: tuple[Device, ...],
        ops: CrossDeviceOps,
        communicator: Communicator,
        counts: Sequence[int],
    ) -> None:
        """Between two runs: gives this worker other replicas, and keeps what the program made."""
        if self.elastic is not None:
            self.elastic.variables.check(has_unreduced=self.gradients.has_unreduced)
        self.mirrors.relayout(*memories_of(devices))
        self.gradients.retire()
        if self._captures is not None:
            self._captures.close()
        self._runner.threads.close()
        self.workers.change(communicator, counts)
        self._lay_out(devices, ops)
        if self.elastic is not None:
            self.elastic.variables.relayout()

    def _undo_drawing(self) -> None:
        """After a run that is undone: random generators of the program are what they were."""
        if self._runner.of_run is not None:
            self._runner.of_run.undo()

    def close(self) -> None:
        if self.elastic is not None:
            self.elastic.close()
        leave(self.workers.communicator)
        super().close()

    def __deepcopy__(self, memo: dict[int, Any]) -> StrategyExtended:
        if self.workers.are_many:
            raise UnsupportedError(
                "A strategy that is connected to other workers cannot be copied. Make a new one on "
                "every worker."
            )
        return MultiWorkerExtended(self.wishes, self.resolver, self.options, ConfigProto())


class MultiWorkerMirroredStrategy(Strategy):
    """Trains on the devices of all workers of a job; alone, on those of this process.

    Every worker runs the same script. Which one this process is, and where the others are, says
    the resolver, or the launcher that has started it (`unisono launch`, `torchrun`, `srun`,
    `mpirun`, TF_CONFIG). Making the strategy waits for all workers.

    Args:
        cluster_resolver: Says which workers there are; found out if None.
        communication_options: How collectives travel, and how long they may take.
        devices: The devices of this worker. None means its share of the host's GPUs, or its CPU.
            Workers may have different numbers of devices.
        num_replicas: The number of replicas on all workers, which share them as evenly as
            possible: 8 replicas over 3 workers are 3, 3 and 2. Replicas of a worker share
            its devices. None means one replica per device. The results do not depend on where the
            replicas are. For that, torch uses one thread per CPU replica inside an operator.
        cross_device_ops: What reduces between the devices of one worker.
        serial: See `MirroredStrategy`.
        reduce_gradients: See `MirroredStrategy`.
        synchronize_batch_norm: See `MirroredStrategy`.
        elastic: Whether the job goes on when it loses workers, with the bits of a job that loses
            none. It needs `num_replicas`. The survivors share the replicas of the lost worker,
            and make the interrupted run again: the Python code of the step runs twice then.
        min_workers: With `elastic`, how many workers it takes to start and to go on.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        devices: DeviceLike | Sequence[DeviceLike] | None = None,
        num_replicas: int | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        serial: bool = False,
        reduce_gradients: ReduceOp | str = ReduceOp.MEAN,
        synchronize_batch_norm: bool = False,
        elastic: bool = False,
        min_workers: int = 1,
    ) -> None:
        if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
            raise ClusterError(
                "`cluster_resolver` must be one of `unisono.cluster_resolver`, got "
                f"{cluster_resolver!r}."
            )
        given, wanted = communication_options, "a `unisono.experimental.CommunicationOptions`"
        check_optional("communication_options", given, CommunicationOptions, wanted)
        options = given or DEFAULT_OPTIONS
        chosen = None if devices is None else replica_devices(devices)
        check_ops(cross_device_ops)
        if num_replicas is not None:
            check_int("num_replicas", num_replicas, least=1)
        check_int("min_workers", min_workers, least=1)
        if check_bool("elastic", elastic):
            _check_elastic(num_replicas, min_workers, options)
        elif min_workers > 1:
            raise UnsupportedError(
                f"`min_workers={min_workers}` says when a job that has lost workers goes on, and "
                "this one ends when it loses one. Add `elastic=True`, or leave out `min_workers`."
            )
        wishes = _Wishes(
            chosen,
            num_replicas,
            cross_device_ops,
            min_workers if elastic else None,
            replica_settings(serial, reduce_gradients, synchronize_batch_norm),
        )
        resolver = cluster_resolver or detect() or SimpleClusterResolver(ClusterSpec({}))
        super().__init__(MultiWorkerExtended(wishes, resolver, options, ConfigProto()))

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver that lists the workers."""
        return self._worker.resolver

    def experimental_admit(self, checkpoint: Checkpoint) -> None:
        """Lets workers join an elastic job from now on, or takes over the state of one.

        Workers that want to join, such as restarted ones, are let in before a batch of an input of
        the checkpoint is taken. They run the same program: there, this call gives the objects of
        the checkpoint the state that they have on the other workers. So the checkpoint must hold
        all that the loop depends on: models, optimizers, schedulers, the input, and how far the
        program is.

        Args:
            checkpoint: A `unisono.experimental.Checkpoint`, the same on all workers. Call this
                right before the loop.

        Raises:
            UnsupportedError: If the strategy is not elastic, or `checkpoint` is something else.
        """
        if self._worker.elastic is None:
            raise UnsupportedError(
                "`experimental_admit()` was called, but workers can only join a job that was made "
                "with `elastic=True`. Make the strategy with it."
            )
        if not callable(getattr(checkpoint, "state_of", None)):
            raise UnsupportedError(
                f"`checkpoint` must be `unisono.experimental.Checkpoint`, got {checkpoint!r}."
            )
        self._worker.elastic.admit(checkpoint)

    def configure(
        self,
        session_config: object = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Joins the workers of a cluster, if one is given, and completes a configuration.

        Args:
            session_config: A `ConfigProto`. Its timeout, group leader and device filters count for
                the cluster, and what it leaves open is filled in.
            cluster_spec: The workers; a `ClusterSpec` or a dict of one.
            task_type: The job of this process in it.
            task_id: Its number there.

        Raises:
            UnsupportedError: If `session_config` is no `ConfigProto`.
            ClusterError: If the cluster cannot be used, or something was made in the scope before.
            CommunicationError: If the workers do not come together.
        """
        check_optional("session_config", session_config, ConfigProto, "a `ConfigProto` or None")
        config: Any = session_config or ConfigProto()
        if cluster_spec is not None:
            self._join(ClusterSpec(cluster_spec), task_type, task_id, config)
        changed = self.update_config_proto(config)
        config.collective_group_leader = changed.collective_group_leader
        config.device_filters = changed.device_filters

    def _join(
        self, spec: ClusterSpec, task_type: str | None, task_id: int | None, config: ConfigProto
    ) -> None:
        before = self._worker
        if before.elastic is not None:
            raise UnsupportedError(
                "`configure()` with a cluster cannot be called with `elastic=True`. Give the "
                "strategy a `cluster_resolver`, or start it with a launcher."
            )
        if before.mirrors.is_in_use:
            raise ClusterError(
                "`configure()` with a cluster was called after something was made in the scope or "
                "a communication hook was registered, which other workers do not share. Call it "
                "first."
            )
        resolver = SimpleClusterResolver(spec, task_type=task_type, task_id=task_id)
        self.close()
        after = MultiWorkerExtended(before.wishes, resolver, before.options, config)
        Strategy.__init__(self, after)

    def update_config_proto(self, config_proto: T) -> T:
        """Returns a copy of `config_proto` that says where this worker is in its cluster."""
        changed = super().update_config_proto(config_proto)
        membership = self._worker.membership
        if isinstance(changed, ConfigProto) and membership.task_type is not None:
            if not changed.collective_group_leader:
                changed.collective_group_leader = membership.leader
            changed.device_filters = [f"/job:{membership.task_type}/task:{membership.task_id}"]
            if changed.timeout_seconds is None:
                changed.timeout_seconds = self._worker.options.timeout_seconds
        return changed

    @property
    def _worker(self) -> MultiWorkerExtended:
        extended = self.extended
        assert isinstance(extended, MultiWorkerExtended)
        return extended

    def __repr__(self) -> str:
        membership = self._worker.membership
        devices = ", ".join(map(str, self._extended.worker_devices))
        return f"{type(self).__name__}(worker {membership.rank} of {membership.size}: {devices})"


def _check_elastic(
    num_replicas: int | None, min_workers: int, options: CommunicationOptions
) -> None:
    if num_replicas is None:
        raise UnsupportedError(
            "With `elastic=True`, the number of replicas must not depend on the workers. Say how "
            "many there are with `num_replicas`."
        )
    if min_workers > num_replicas:
        raise UnsupportedError(
            f"`min_workers` is {min_workers}, but each worker needs a replica, and "
            f"`num_replicas` is {num_replicas}. Lower `min_workers`, or ask for more replicas."
        )
    if options.implementation is CommunicationImplementation.NCCL:
        raise UnsupportedError(
            "With `elastic=True`, gradients cannot travel through NCCL, which does not survive the "
            "loss of a worker. Leave `implementation` of the options at AUTO."
        )


def _visible(
    devices: tuple[Device, ...] | None, membership: Membership, config: ConfigProto
) -> tuple[Device, ...]:
    devices = local_devices(membership) if devices is None else devices
    if membership.task_type is None or membership.task_id is None:
        return devices
    visible = config.visible(devices, membership.task_type, membership.task_id)
    if not visible:
        raise DeviceError(
            f"The filters {config.device_filters} leave none of this worker's devices "
            f"{', '.join(map(str, devices))}. Name one of them in `device_filters`."
        )
    return visible
