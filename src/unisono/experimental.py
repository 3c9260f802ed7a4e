"""The names of `tf.distribute.experimental`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from unisono.arguments import warn_of_older as _warn_of_older
from unisono.checkpoints import (
    Checkpoint,
    CheckpointManager,
    PreemptionCheckpointHandler,
    TerminationConfig,
)
from unisono.input import ValueContext
from unisono.options import CommunicationImplementation, CommunicationOptions
from unisono.workers import MultiWorkerMirroredStrategy as _Today

if TYPE_CHECKING:
    from unisono.cluster import ClusterResolver

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "PreemptionCheckpointHandler",
    "TerminationConfig",
    "ValueContext",
]

CollectiveCommunication = CommunicationImplementation


class MultiWorkerMirroredStrategy(_Today):
    """`unisono.MultiWorkerMirroredStrategy` with the arguments it had in TensorFlow 2.3.

    Args:
        communication: Who carries a collective between workers; a member of
            `CollectiveCommunication` or its name.
        cluster_resolver: Says which workers there are; found out if None.
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = CommunicationImplementation.AUTO,
        cluster_resolver: ClusterResolver | None = None,
    ) -> None:
        today = "unisono.MultiWorkerMirroredStrategy"
        _warn_of_older("unisono.experimental.MultiWorkerMirroredStrategy", today)
        implementation = CommunicationImplementation.read(communication, "communication")
        super().__init__(cluster_resolver, CommunicationOptions(implementation=implementation))


def CollectiveHints(
    bytes_per_pack: int = 0, timeout_seconds: float | None = None
) -> CommunicationOptions:
    """Returns `CommunicationOptions`, the current name.

    Args:
        bytes_per_pack: See `CommunicationOptions`.
        timeout_seconds: See `CommunicationOptions`.
    """
    today = "unisono.experimental.CommunicationOptions"
    _warn_of_older("unisono.experimental.CollectiveHints", today)
    return CommunicationOptions(bytes_per_pack, timeout_seconds)
