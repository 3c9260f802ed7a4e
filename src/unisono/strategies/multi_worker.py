"""`MultiWorkerMirroredStrategy`: the devices of many workers, which train as one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from unisono.arguments import check_bool
from unisono.cluster import ClusterResolver, ClusterSpec, Membership, SimpleClusterResolver, detect
from unisono.cluster.rules import collective_leader
from unisono.devices import Device, DeviceLike, replica_devices
from unisono.errors import ClusterError, DeviceError, UnsupportedError
from unisono.options import DEFAULT_OPTIONS, CommunicationOptions, ReduceOp
from unisono.reductions import CrossDeviceOps, check_ops, select_cross_device_ops
from unisono.strategies.config import ConfigProto
from unisono.strategies.extended import StrategyExtended
from unisono.strategies.joining import join, leave, led_by, local_devices
from unisono.strategies.strategy import Strategy, T


class MultiWorkerExtended(StrategyExtended):
    """Further methods of a strategy of many workers."""

    experimental_between_graph = True

    def __init__(
        self,
        maker: _Maker,
        resolver: ClusterResolver,
        membership: Membership,
        *args: Any,
        **kw: Any,
    ) -> None:
        super().__init__(*args, **kw)
        self.maker = maker
        self.resolver = resolver
        self.membership = membership

    @property
    def should_checkpoint(self) -> bool:  # type: ignore[override]
        """Whether this worker writes checkpoints: the chief does."""
        return self.membership.is_chief

    @property
    def should_save_summary(self) -> bool:  # type: ignore[override]
        """Whether this worker writes summaries: the chief does."""
        return self.membership.is_chief

    def close(self) -> None:
        leave(self.workers.communicator)
        super().close()

    def __deepcopy__(self, memo: dict[int, Any]) -> StrategyExtended:
        if self.workers.are_many:
            raise UnsupportedError(
                "A strategy that is connected to other workers cannot be copied. Make a new one on "
                "every worker."
            )
        return self.maker(self.resolver, self.options, ConfigProto())


class MultiWorkerMirroredStrategy(Strategy):
    """Trains on the devices of all workers of a job; alone, on those of this process.

    Every worker runs the same script. Which one this process is, and where the others are, says
    the resolver, or the launcher that has started it (`unisono launch`, `torchrun`, `srun`,
    `mpirun`, TF_CONFIG). Making the strategy waits for all workers.

    Args:
        cluster_resolver: Says which workers there are; found out if None.
        communication_options: How collectives travel, and how long they may take.
        devices: One device per replica of this worker. None means its share of the host's GPUs,
            or one CPU replica. Every worker must have the same number of devices.
        cross_device_ops: What reduces between the devices of one worker.
        serial: See `MirroredStrategy`.
        reduce_gradients: See `MirroredStrategy`.
        synchronize_batch_norm: See `MirroredStrategy`.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        devices: DeviceLike | Sequence[DeviceLike] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        serial: bool = False,
        reduce_gradients: ReduceOp | str = ReduceOp.MEAN,
        synchronize_batch_norm: bool = False,
    ) -> None:
        if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
            raise ClusterError(
                "`cluster_resolver` must be one of `unisono.cluster_resolver`, got "
                f"{cluster_resolver!r}."
            )
        options = DEFAULT_OPTIONS if communication_options is None else communication_options
        if not isinstance(options, CommunicationOptions):
            raise UnsupportedError(
                "`communication_options` must be `unisono.experimental.CommunicationOptions`, got "
                f"{communication_options!r}."
            )
        chosen = None if devices is None else replica_devices(devices)
        check_ops(cross_device_ops)
        maker = _Maker(
            chosen,
            cross_device_ops,
            is_serial=check_bool("serial", serial) or os.environ.get("UNISONO_SERIAL") == "1",
            reduce_gradients=ReduceOp.read(reduce_gradients, "reduce_gradients"),
            synchronize_batch_norm=check_bool("synchronize_batch_norm", synchronize_batch_norm),
        )
        resolver = cluster_resolver or detect() or SimpleClusterResolver(ClusterSpec({}))
        super().__init__(maker(resolver, options, ConfigProto()))

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver that lists the workers."""
        return self._worker.resolver

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
        config = ConfigProto() if session_config is None else session_config
        if not isinstance(config, ConfigProto):
            raise UnsupportedError(
                f"`session_config` must be a `ConfigProto`, got {type(config).__name__}."
            )
        if cluster_spec is not None:
            self._join(ClusterSpec(cluster_spec), task_type, task_id, config)
        changed = self.update_config_proto(config)
        config.collective_group_leader = changed.collective_group_leader
        config.device_filters = changed.device_filters

    def _join(
        self, spec: ClusterSpec, task_type: str | None, task_id: int | None, config: ConfigProto
    ) -> None:
        before = self._worker
        if before.mirrors.is_in_use:
            raise ClusterError(
                "`configure()` with a cluster was called after something was made in the scope or "
                "a communication hook was registered, which other workers do not share. Call it "
                "first."
            )
        resolver = SimpleClusterResolver(spec, task_type=task_type, task_id=task_id)
        self.close()
        Strategy.__init__(self, before.maker(resolver, before.options, config))

    def update_config_proto(self, config_proto: T) -> T:
        """Returns a copy of `config_proto` that says where this worker is in its cluster."""
        changed = super().update_config_proto(config_proto)
        membership = self._worker.membership
        if isinstance(changed, ConfigProto) and membership.task_type is not None:
            task = (membership.task_type, membership.task_id)
            if not changed.collective_group_leader:
                changed.collective_group_leader = collective_leader(membership.spec, *task)
            changed.device_filters = [f"/job:{task[0]}/task:{task[1]}"]
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


class _Maker:
    """Makes the extension of a strategy once it is known who the workers are."""

    def __init__(
        self,
        devices: tuple[Device, ...] | None,
        cross_device_ops: CrossDeviceOps | None,
        **settings: Any,
    ) -> None:
        self._devices = devices
        self._ops = cross_device_ops
        self._settings = settings

    def __call__(
        self, resolver: ClusterResolver, options: CommunicationOptions, config: ConfigProto
    ) -> MultiWorkerExtended:
        membership = Membership.of(resolver)
        membership = led_by(membership, config.leader_rank(membership.spec))
        if config.timeout_seconds is not None:
            options = replace(options, timeout_seconds=config.timeout_seconds)
        devices = self._visible(membership, config)
        communicator, tuning = join(membership, devices, options)
        return MultiWorkerExtended(
            self,
            resolver,
            membership,
            devices,
            self._ops or select_cross_device_ops(devices, tuning),
            options=options,
            communicator=communicator,
            tuning=tuning,
            **self._settings,
        )

    def _visible(self, membership: Membership, config: ConfigProto) -> tuple[Device, ...]:
        devices = local_devices(membership) if self._devices is None else self._devices
        if membership.task_type is None or membership.task_id is None:
            return devices
        visible = config.visible(devices, membership.task_type, membership.task_id)
        if not visible:
            raise DeviceError(
                f"The filters {config.device_filters} leave none of this worker's devices "
                f"{', '.join(map(str, devices))}. Name one of them in `device_filters`."
            )
        return visible
