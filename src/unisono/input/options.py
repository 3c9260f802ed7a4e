"""What an input function gets as its context, and how input is fetched."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.arguments import check_bool, check_instance, check_int, check_optional, in_words
from unisono.errors import UnsupportedError
from unisono.values import flatten


@dataclass(frozen=True)
class InputContext:
    """The part of the input that an input pipeline produces.

    Attributes:
        num_input_pipelines: How many pipelines there are, one per worker unless asked otherwise.
        input_pipeline_id: Which of them this is.
        num_replicas_in_sync: How many replicas all pipelines feed together.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        check_int("num_replicas_in_sync", self.num_replicas_in_sync, least=1)
        _check_one_of(self, "input_pipeline_id", "num_input_pipelines")

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the batch size of one replica.

        Args:
            global_batch_size: How many samples all replicas get together.

        Raises:
            UnsupportedError: If they cannot be shared out evenly.
        """
        check_int("global_batch_size", global_batch_size)
        share, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise UnsupportedError(
                f"A global batch of {global_batch_size} does not divide evenly over "
                f"{self.num_replicas_in_sync} replicas: the remainder is {rest}. Use a "
                f"multiple of {self.num_replicas_in_sync}."
            )
        return share


@dataclass(frozen=True)
class ValueContext:
    """The replica that a value is created for.

    Attributes:
        replica_id_in_sync_group: The replica.
        num_replicas_in_sync: How many there are.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        _check_one_of(self, "replica_id_in_sync_group", "num_replicas_in_sync")


def _check_one_of(context: object, which: str, how_many: str) -> None:
    """Raises unless attribute `which` of a context is a number below attribute `how_many`."""
    num = check_int(how_many, getattr(context, how_many))
    index = check_int(which, getattr(context, which))
    if not 0 <= index < num:
        raise UnsupportedError(
            f"`{which}` must be from 0 to {num - 1}, as `{how_many}` is {num}; got {index}."
        )


class AutoShardPolicy(enum.IntEnum):
    """How the workers share a dataset.

    `AUTO` and `DATA`: all workers read everything, and each keeps its samples of every batch.
    `FILE`: worker w of W reads the files w, w + W, ..., the members of a `ConcatDataset` or
    `ChainDataset`. `OFF`: each worker gets all that its dataset gives, which may be another one
    on each. `HINT` is for hints in TensorFlow's pipelines; there are none here, so it is `OFF`.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class InputReplicationMode(enum.Enum):
    """How often an input function is called: `PER_WORKER`, once per worker, or `PER_REPLICA`."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclass(frozen=True)
class InputOptions:
    """How input is fetched.

    Attributes:
        experimental_fetch_to_device: Whether a replica's part is copied to its device. Otherwise
            all parts stay on the host.
        experimental_replication_mode: How often an input function is called.
        experimental_place_dataset_on_device: Whether an input function makes its batches on the
            device of its replica. Needs `PER_REPLICA`, and no fetching to the device.
        experimental_per_replica_buffer_size: How many steps are fetched ahead of use. 0 fetches
            nothing ahead. 1 fetches ahead where that cannot change a random number: from a
            `DataLoader` with workers, whose samples are made in other processes. 2 or more fetches
            ahead from any source: what the source draws from the global random generators is then
            drawn on another thread, at no certain time. Workers that read the same data must draw
            the same numbers, so they fetch ahead only as with 1.
        auto_shard_policy: How workers share what `experimental_distribute_dataset` is given.
        split: How a batch is split over the replicas of all workers. "even": sizes differ by at
            most one, so that 4 samples over 3 replicas are 2, 1, 1; if there are fewer samples than
            replicas, the last replicas get a copy of a sample that counts nothing. "tensorflow": 2,
            2, 0, and a replica without samples gets an empty part. A function, called as
            `split(batch, num_replicas)`, returns a list with the part of each replica, or None for
            one that has no samples: for graphs, say, or lists of images of different sizes. All
            workers call it with the same batch.
        batch_dim: Which dimension of the tensors in a batch holds the samples: an int, or a
            structure like the batch of them, such as `(1, 0)`. In it, None gives all of a leaf to
            every replica, and one entry stands for all that is inside. If `batch_dim` itself is
            None it is the first dimension, and lists with an entry per sample are found.
        count_samples: Returns the number of samples of the part, or batch, of one replica, which
            says how much its loss counts. None reads it from the sizes of the tensors.
    """

    experimental_fetch_to_device: bool = True
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO
    split: str | Callable[[Any, int], Sequence[Any]] = "even"
    batch_dim: Any = None
    count_samples: Callable[[Any], int] | None = None

    def __post_init__(self) -> None:
        mode, policy = self.experimental_replication_mode, self.auto_shard_policy
        modes = ", ".join(map(str, InputReplicationMode))
        policies = ", ".join(member.name for member in AutoShardPolicy)
        wanted = f"one of {policies} of `AutoShardPolicy`"
        check_instance("auto_shard_policy", policy, AutoShardPolicy, wanted)
        name = "experimental_replication_mode"
        check_instance(name, mode, InputReplicationMode, f"one of {modes}")
        is_name = isinstance(self.split, str) and self.split in ("even", "tensorflow")
        if not is_name and not callable(self.split):
            raise UnsupportedError(
                '`split` must be "even", "tensorflow" or a function `split(batch, num_replicas)`, '
                f"got {in_words(self.split)}."
            )
        if self.count_samples is not None and not callable(self.count_samples):
            raise UnsupportedError(
                "`count_samples` must be a function that returns the number of samples of a batch, "
                f"got {in_words(self.count_samples)}."
            )
        for leaf in flatten(self.batch_dim)[0]:
            if leaf is not None and (isinstance(leaf, bool) or not isinstance(leaf, int)):
                raise UnsupportedError(
                    "`batch_dim` must be an int, or a structure of ints and None like a batch, got "
                    f"{in_words(leaf)} in {in_words(self.batch_dim)}."
                )
        name = "experimental_per_replica_buffer_size"
        check_int(name, self.experimental_per_replica_buffer_size, least=0)
        for name in ("experimental_fetch_to_device", "experimental_place_dataset_on_device"):
            check_bool(name, getattr(self, name))
        if self.experimental_place_dataset_on_device and (
            self.experimental_fetch_to_device or mode is not InputReplicationMode.PER_REPLICA
        ):
            raise UnsupportedError(
                "`experimental_place_dataset_on_device` needs `experimental_fetch_to_device=False` "
                "and `experimental_replication_mode=InputReplicationMode.PER_REPLICA`, got "
                f"{self.experimental_fetch_to_device} and {mode}."
            )


DEFAULT_INPUT_OPTIONS = InputOptions()


def check_input_options(options: Any) -> InputOptions:
    """Returns `options`, or the default ones for None."""
    check_optional("options", options, InputOptions, "a `unisono.InputOptions` or None")
    return DEFAULT_INPUT_OPTIONS if options is None else options
