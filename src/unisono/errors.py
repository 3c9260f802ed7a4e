"""What Unisono raises. Every message says what was asked, what was found and what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch.distributed import DistBackendError

__all__ = [
    "BatchError",
    "CaptureError",
    "ClusterError",
    "CommunicationError",
    "ContextError",
    "DestinationError",
    "DeviceError",
    "EndOfInputError",
    "JobMismatchError",
    "ReplicaMismatchError",
    "TraceError",
    "TuningError",
    "UnequalCallsError",
    "UnequalCollectivesError",
    "UnisonoError",
    "UnsupportedAttributeError",
    "UnsupportedError",
    "WorkerLostError",
    "WorkerTimeoutError",
    "add_note",
]


class UnisonoError(Exception):
    """The base of every error that Unisono raises itself."""


class DeviceError(UnisonoError, ValueError):
    """A device name that cannot be read, or a device that this host does not have."""


class DestinationError(UnisonoError, ValueError):
    """A `destinations` argument that names no device."""


class BatchError(UnisonoError, ValueError):
    """A batch that is not an iterable of `(value, destinations)` tuples."""


class ReplicaMismatchError(UnisonoError, ValueError):
    """Replicas that hold values of different shape, dtype or layout, or no value at all."""


class UnsupportedError(UnisonoError, ValueError):
    """An operation, dtype, layout or argument that has no meaning where it was given."""


class UnsupportedAttributeError(UnsupportedError, AttributeError):
    """An attribute that tensors have, asked of a value that is not one tensor."""


class ContextError(UnisonoError, RuntimeError):
    """A call in a context where it has no meaning."""


class CaptureError(UnisonoError, RuntimeError):
    """A step that cannot be captured although it must be, or that cannot be replayed."""


class EndOfInputError(UnisonoError, IndexError):
    """A distributed iterator that was asked for more steps than it has."""


class UnequalCallsError(UnisonoError, RuntimeError):
    """Replicas that make different calls."""


class ClusterError(UnisonoError, ValueError):
    """An environment variable or a cluster spec that does not describe a usable cluster."""


class TraceError(UnisonoError, ValueError):
    """A folder or file that holds no trace, or not that of one run."""


class TuningError(UnisonoError, ValueError):
    """Constants of the cost model that are broken, of another machine, or cannot be fitted."""


class CommunicationError(UnisonoError, DistBackendError):
    """Workers that cannot go on together. Also what torch expects from its backends.

    Args:
        message: What was asked, what was found and what to do.
        ranks: The ranks at fault, as far as they are known.
    """

    # Whether `ranks` are those of the whole job, where some of its ranks connect.
    is_of_all = False

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class WorkerLostError(CommunicationError):
    """A worker that has ended, or that cannot be reached any more."""


class WorkerTimeoutError(CommunicationError, TimeoutError):
    """A worker that did not take part in a collective within the time given."""

    def __init__(self, message: str, ranks: Iterable[int] = ()) -> None:
        # Programs look for these words in the errors of any backend.
        if "timed out" not in message.lower():
            message = f"Timed out: the timeout has passed. {message}"
        super().__init__(message, ranks)


class UnequalCollectivesError(CommunicationError):
    """Workers that call different collectives, or one with another shape, dtype or operation."""


class JobMismatchError(CommunicationError):
    """A worker that belongs to another job, runs another script or counts other workers."""


def add_note(error: BaseException, note: str) -> None:
    """Adds a `note` to an `error`, such as where it was raised; nothing before Python 3.11.

    An error that is raised again and again gets the same note once.
    """
    if sys.version_info >= (3, 11) and note not in getattr(error, "__notes__", ()):
        error.add_note(note)
