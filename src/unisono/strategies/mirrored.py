"""The strategies of one process: `MirroredStrategy`, `OneDeviceStrategy`, and the default one."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from unisono.arguments import check_bool
from unisono.contexts import ReplicaContext, set_outside
from unisono.devices import Device, DeviceLike, default_devices, replica_devices, resolve
from unisono.engines import ReplicaMeeting, Turns
from unisono.errors import ClusterError, ContextError
from unisono.options import ReduceOp
from unisono.reductions import (
    CrossDeviceOps,
    Prices,
    ReductionToOneDevice,
    check_ops,
    select_cross_device_ops,
)
from unisono.strategies.extended import StrategyExtended
from unisono.strategies.strategy import Strategy
from unisono.system import is_tuned

if TYPE_CHECKING:
    from unisono.hooks.hook import HookFunction

_logger = logging.getLogger("unisono")
# Launchers set one of them, at least. What they say, `unisono.cluster` reads.
LAUNCHED = (
    "JOB_COMPLETION_INDEX",
    "MPI_LOCALRANKID",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "RANK",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "TF_CONFIG",
    "TORCHELASTIC_RUN_ID",
    "WORLD_SIZE",
)


class MirroredStrategy(Strategy):
    """Trains on all devices of a host, one replica per device, from one process.

    Args:
        devices: One device per replica. None means all GPUs, or one CPU replica without any. CPU
            devices are replica slots: `["cpu:0", "cpu:1"]` makes two replicas. A single device
            makes one replica.
        cross_device_ops: What reduces between the devices; chosen by the devices if None.
        serial: Runs replicas one after another, so that a debugger can stand in one of them. The
            environment variable UNISONO_SERIAL=1 does the same.
        reduce_gradients: How gradients are aggregated. `MEAN` fits a loss that is a mean over the
            replica's batch, as torch's losses are; `SUM` one that is divided by the global batch.
        synchronize_batch_norm: Whether batch normalization is over the batches of all replicas. If
            not, each replica normalizes its own batch, and the running statistics are averaged
            at the end of every `run`.
    """

    def __init__(
        self,
        devices: DeviceLike | Sequence[DeviceLike] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        serial: bool = False,
        reduce_gradients: ReduceOp | str = ReduceOp.MEAN,
        synchronize_batch_norm: bool = False,
    ) -> None:
        resolved = default_devices() if devices is None else replica_devices(devices)
        check_ops(cross_device_ops)
        _warn_of_other_workers()
        tuning = _tuning()
        super().__init__(
            StrategyExtended(
                resolved,
                cross_device_ops or select_cross_device_ops(resolved, tuning),
                tuning=tuning,
                **replica_settings(serial, reduce_gradients, synchronize_batch_norm),
            )
        )


def replica_settings(serial: Any, reduce_gradients: Any, batch_norm: Any) -> dict[str, Any]:
    """Returns the arguments of an extension that all strategies of many replicas take."""
    return {
        "reduce_gradients": ReduceOp.read(reduce_gradients, "reduce_gradients"),
        "is_serial": check_bool("serial", serial) or os.environ.get("UNISONO_SERIAL") == "1",
        "synchronize_batch_norm": check_bool("synchronize_batch_norm", batch_norm),
    }


def _tuning() -> Prices | None:
    """Returns what the links of this host were measured to cost, if they were."""
    if not is_tuned():
        return None
    from unisono.costs import current_tuning

    return current_tuning()


def _warn_of_other_workers() -> None:
    """Says so if a launcher has started several workers, which would all train by themselves."""
    if not any(map(os.environ.get, LAUNCHED)):
        return
    from unisono.cluster import Membership, detect

    with suppress(ClusterError):
        resolver = detect()
        num_workers = 1 if resolver is None else Membership.of(resolver).size
        if num_workers > 1:
            _logger.warning(
                "MirroredStrategy has the devices of this process alone, but %d workers were "
                "started: each will train by itself. Use MultiWorkerMirroredStrategy.",
                num_workers,
            )


class OneDeviceStrategy(Strategy):
    """Trains on one device, with the programming model of many.

    Args:
        device: Where its one replica runs.
    """

    def __init__(self, device: DeviceLike) -> None:
        resolved = (resolve(device),)
        super().__init__(StrategyExtended(resolved, select_cross_device_ops(resolved)))


class DefaultStrategy(Strategy):
    """What `get_strategy()` gives outside every scope."""

    def __init__(self) -> None:
        super().__init__(StrategyExtended((Device("cpu", 0),), ReductionToOneDevice()))

    def register_comm_hook(self, state: object, hook: HookFunction) -> None:
        """Refuses: outside every scope no gradients are reduced."""
        raise ContextError(
            "The default strategy does not reduce gradients, so it takes no communication hook. "
            "Make a strategy, and call its `register_comm_hook()`."
        )


set_outside(ReplicaContext(DefaultStrategy().extended, 0, ReplicaMeeting(1, Turns(1))))
