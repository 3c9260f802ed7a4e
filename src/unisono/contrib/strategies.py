"""The strategies of `tf.contrib.distribute` that differ from those of today."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

from unisono.arguments import check_int
from unisono.cluster import ClusterSpec, SimpleClusterResolver
from unisono.devices import DeviceLike, resolve
from unisono.errors import DeviceError, UnsupportedError
from unisono.input import DistributedIterator
from unisono.options import CommunicationImplementation, CommunicationOptions
from unisono.reductions import CrossDeviceOps
from unisono.strategies import MirroredStrategy as CoreMirroredStrategy
from unisono.strategies import Strategy
from unisono.workers import MultiWorkerMirroredStrategy


class MirroredStrategy(CoreMirroredStrategy):
    """`unisono.MirroredStrategy` with the arguments and the batch size of `tf.contrib.distribute`.

    The batches of `make_dataset_iterator` have the size of one replica's batch. Those of
    `unisono.MirroredStrategy` have the global size.

    Args:
        devices: One device per replica. None means `num_gpus` GPUs.
        num_gpus: The number of GPUs; 0 means one CPU replica, None all GPUs of the host.
        num_gpus_per_worker: The same as `num_gpus`. Give one of them.
        cross_device_ops: What reduces between the devices; chosen by the devices if None.
        auto_shard_dataset: Whether several workers share a dataset. This strategy has one worker,
            so nothing is to be shared.
        cross_tower_ops: The older name of `cross_device_ops`.
    """

    def __init__(
        self,
        devices: Sequence[DeviceLike] | None = None,
        num_gpus: int | None = None,
        num_gpus_per_worker: int | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        auto_shard_dataset: bool = False,  # noqa: FBT001, FBT002 - the signature of TensorFlow
        cross_tower_ops: CrossDeviceOps | None = None,
    ) -> None:
        chosen = _one_of(num_gpus=num_gpus, num_gpus_per_worker=num_gpus_per_worker)
        if chosen is not None:
            devices = _one_of(devices=devices, num_gpus=local_devices(chosen))
        ops = _one_of(cross_device_ops=cross_device_ops, cross_tower_ops=cross_tower_ops)
        super().__init__(devices, ops)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None, destinations: Any = None) -> Any:
        """See `Strategy.reduce`, whose third argument was called `destinations` in 1.12.

        In that form, `reduce_op` is a `VariableAggregation`.
        """
        return super().reduce(reduce_op, value, axis if destinations is None else destinations)

    def make_dataset_iterator(self, dataset: Any) -> DistributedIterator:
        """Returns an iterator that gives each replica a whole batch of `dataset` in each step.

        Args:
            dataset: A `DataLoader` or any iterable, with batches of one replica's size.
        """
        return self.make_input_fn_iterator(lambda _: dataset)


def local_devices(num_gpus: int) -> list[str]:
    """Returns the first `num_gpus` GPUs of the host, or one CPU replica if that is 0."""
    if check_int("num_gpus", num_gpus) < 0:
        raise DeviceError(f"The number of GPUs must be 0 or more, got {num_gpus}.")
    if num_gpus > 0:
        # The last one first: there may be far fewer.
        resolve(f"cuda:{num_gpus - 1}")
    return [f"cuda:{index}" for index in range(num_gpus)] or ["cpu:0"]


def _one_of(**arguments: Any) -> Any:
    given = {name: value for name, value in arguments.items() if value is not None}
    if len(given) > 1:
        raise UnsupportedError(
            f"{' and '.join(f'`{name}`' for name in given)} mean the same. Give only one of them."
        )
    return next(iter(given.values()), None)


class _Unsupported:
    """Something that cannot be made; the error says what to use `instead`."""

    instead: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises an `UnsupportedError`, whatever `args` and `kwargs` there are."""
        raise UnsupportedError(self.instead)


class ParameterServerStrategy(_Unsupported, Strategy):
    """Parameter servers are not supported: creating one raises an error that says what to use."""

    instead = (
        "`ParameterServerStrategy` trains asynchronously, with variables on parameter servers. "
        "Unisono trains synchronously: use `unisono.MirroredStrategy` on one host, and "
        "`unisono.MultiWorkerMirroredStrategy` on several workers."
    )


class TPUStrategy(_Unsupported, Strategy):
    """TPUs are not supported: creating one raises an error that says what to use."""

    instead = (
        "`TPUStrategy` needs TPUs. Unisono trains on CPUs and GPUs: use `unisono.MirroredStrategy`."
    )


class MultiWorkerAllReduce(_Unsupported, CrossDeviceOps):
    """Not supported: creating one raises an error that says what to use."""

    instead = (
        "`MultiWorkerAllReduce` reduces between the devices of all workers from one process. "
        "Here every worker runs the script and drives its own devices: use "
        "`unisono.MultiWorkerMirroredStrategy`, which reduces between workers by itself."
    )


def run_standard_tensorflow_server(session_config: object = None) -> NoReturn:
    """Raises an `UnsupportedError` for any `session_config`: there are no servers."""
    raise UnsupportedError(
        "There is no TensorFlow server that another process could drive. Start the script itself "
        "on every worker, for example with `unisono launch` or `torchrun`."
    )


class CollectiveAllReduceStrategy(MultiWorkerMirroredStrategy):
    """Trains on the devices of this process, and after `configure` on those of a whole cluster.

    It is `MultiWorkerMirroredStrategy` under its older name, which asks no launcher.

    Args:
        num_gpus_per_worker: How many GPUs each worker has; 0 means one CPU replica.
        communication: Who carries a collective between workers; a member of
            `CommunicationImplementation` or its name.
    """

    def __init__(
        self,
        num_gpus_per_worker: int = 0,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
    ) -> None:
        implementation = CommunicationImplementation.read(communication, "communication")
        super().__init__(
            SimpleClusterResolver(ClusterSpec({})),
            CommunicationOptions(implementation=implementation),
            devices=local_devices(num_gpus_per_worker),
        )
