"""What Unisono raises.

    UnisonoError
    ├── DeviceError           ValueError   a device that cannot be read, or is not here
    ├── DestinationError      ValueError   something that names no device to reduce to
    ├── BatchError            ValueError   a batch that is not an iterable of (value, destinations)
    ├── ReplicaMismatchError  ValueError   replicas that hold values that do not go together
    ├── UnsupportedError      ValueError   an operation, dtype, layout or argument that has no
    │   │                                  meaning here
    │   └── UnsupportedAttributeError AttributeError  an attribute of a tensor that a value lacks
    ├── ContextError          RuntimeError something called where it has no meaning
    ├── CaptureError          RuntimeError a step that cannot be captured, or not be replayed
    ├── EndOfInputError       IndexError   a step that is asked of an input that has none left
    ├── UnequalCallsError     RuntimeError replicas that do not make the same calls in one order
    ├── ClusterError          ValueError   an environment or a spec that names no usable cluster
    ├── TraceError            ValueError   a folder that holds no trace, or not of one run
    ├── TuningError           ValueError   constants of the cost model that cannot be used
    └── CommunicationError    RuntimeError workers that cannot go on together; `ranks` says which;
        │                                  to torch a `torch.distributed.DistBackendError`
        ├── WorkerLostError                a worker that has ended or cannot be reached
        ├── WorkerTimeoutError TimeoutError a worker that did not come within the time given
        ├── UnequalCollectivesError        workers that call different collectives
        └── JobMismatchError               a worker of another job, script or world size

Every message says what was asked, what was found and what to do.
"""

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
