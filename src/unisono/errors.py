"""What Unisono raises.

    UnisonoError
    ├── DeviceError           ValueError   a device that cannot be read, or is not here
    ├── DestinationError      ValueError   something that names no device to reduce to
    ├── BatchError            ValueError   a batch that is not an iterable of (value, destinations)
    ├── ReplicaMismatchError  ValueError   replicas that hold values that do not go together
    ├── UnsupportedError      ValueError   an operation, dtype or layout that has no meaning here
    ├── ContextError          RuntimeError something called where it has no meaning
    └── UnequalCallsError     RuntimeError replicas that do not make the same calls in one order

Every message says what was asked, what was found and what to do.
"""


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
    """An operation, dtype or layout that cannot be reduced."""


class ContextError(UnisonoError, RuntimeError):
    """Something that was called in a context where it has no meaning."""


class UnequalCallsError(UnisonoError, RuntimeError):
    """Replicas that do not meet: one makes a call that another does not make."""
