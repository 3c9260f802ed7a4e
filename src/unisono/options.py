"""How values are combined, and how they travel."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from unisono.arguments import check_instance, check_int, check_timeout, in_words
from unisono.errors import UnsupportedError

_Member = TypeVar("_Member", bound="_Named")


class _Named(enum.Enum):
    """An enumeration whose members are also read from their names."""

    @classmethod
    def read(cls: type[_Member], given: object, what: str = "reduce_op") -> _Member:
        """Returns a member from itself or its name, in any case.

        Args:
            given: The member or its name.
            what: What an error calls it.

        Raises:
            UnsupportedError: If it is neither.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, str) and given.upper() in cls.__members__:
            return cls[given.upper()]
        raise UnsupportedError(
            f"`{what}` must be one of {cls.__name__}.{', '.join(cls.__members__)} or its name, got "
            f"{in_words(given)}."
        )


class ReduceOp(_Named):
    """How the values of the replicas are combined.

    `SUM` and `MEAN` are the operations of `tf.distribute`; `MIN`, `MAX` and `PROD` are additions.
    """

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PROD = "prod"


class VariableAggregation(enum.Enum):
    """How the values that the replicas write to a variable are combined.

    `SUM` and `MEAN` combine them, `ONLY_FIRST_REPLICA` takes that of replica 0. With `NONE` nothing
    is combined: each replica keeps its own value.
    """

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"

    @property
    def reduce_op(self) -> ReduceOp | None:
        """The operation that combines the values; None where they are not combined."""
        return ReduceOp.__members__.get(self.name)


class CommunicationImplementation(_Named):
    """The library that runs a collective between workers.

    `AUTO` takes shared memory inside a host and Gloo between hosts, or MPI where an MPI launcher
    started the workers and mpi4py is installed. For GPU tensors it takes NCCL if every worker has
    its own GPUs. `RING` is Gloo alone, between all workers. `NCCL` takes NCCL for GPU tensors
    in any case. `TCP` takes Unisono's own TCP connections between hosts: they can be encrypted,
    and small messages take less time on them.

    NCCL adds in its own order. With `RING` and `TCP` GPU tensors travel through host memory,
    so the same replicas give the same bits at every layout.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"
    TCP = "TCP"

    @classmethod
    def _missing_(cls, value: object) -> CommunicationImplementation:
        return cls.read(value, "implementation")


@dataclass(frozen=True)
class CommunicationOptions:
    """Hints for one reduction, or for all reductions of a strategy.

    Args:
        bytes_per_pack: Reduce a batch in packs of a little more than this many bytes. 0 leaves
            the packing to the cross-device operation.
        timeout_seconds: How long a collective between workers may wait for the others. None means
            five minutes. It must be finite.
        implementation: Who carries a collective between workers; a member or its name.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        checked = {
            "bytes_per_pack": check_int("bytes_per_pack", self.bytes_per_pack, least=0),
            "timeout_seconds": check_timeout("timeout_seconds", self.timeout_seconds),
            "implementation": CommunicationImplementation.read(
                self.implementation, "implementation"
            ),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def merge(self, other: CommunicationOptions | None) -> CommunicationOptions:
        """Returns these options with every field that `other` sets put in place.

        A field counts as set when it differs from its default, so a pack size cannot be merged
        back to 0 nor an implementation back to `AUTO`. A timeout of `0.0` counts as set.
        """
        if other is None:
            return self
        given = vars(check_options(other))
        default = vars(DEFAULT_OPTIONS)
        return replace(self, **{name: one for name, one in given.items() if one != default[name]})


DEFAULT_OPTIONS = CommunicationOptions()


def check_options(options: Any) -> CommunicationOptions:
    """Returns `options`, or the default ones for None."""
    if options is None:
        return DEFAULT_OPTIONS
    wanted = "a `unisono.experimental.CommunicationOptions` or None"
    check_instance("options", options, CommunicationOptions, wanted)
    return cast(CommunicationOptions, options)
