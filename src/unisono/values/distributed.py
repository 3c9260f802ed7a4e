"""Values with a component per replica: `PerReplica` if they differ, `Mirrored` if they agree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from typing_extensions import Self

from unisono.arguments import check_int, check_iterable
from unisono.devices import Device, DeviceLike, cpu_slots, resolve
from unisono.errors import ReplicaMismatchError, UnsupportedAttributeError, UnsupportedError
from unisono.values.tensor_like import TensorLike, replica_seen


class Origin(NamedTuple):
    """Where a value comes from, in a job whose workers come and go.

    `of_all` has the components of all replicas, if they are known here. `step` is the step of an
    input that workers read for themselves.
    """

    generation: int
    versions: tuple[int, ...]
    of_all: tuple[Any, ...] | None
    step: Any = None


class DistributedValues:
    """One component per replica, by replica id.

    Args:
        values: The components, of any type. Only those that can be read as a tensor can be reduced.
        devices: One device per component. By default, the device of a CUDA tensor, and `cpu:i` for
            any other component.
    """

    __slots__ = ("_devices", "_values")

    def __init__(self, values: Iterable[Any], devices: Sequence[DeviceLike] | None = None) -> None:
        self._values: tuple[Any, ...] = tuple(check_iterable("values", values))
        self._devices: tuple[Device, ...] | None = None
        if devices is not None:
            self._devices = _checked(devices, len(self._values))

    @classmethod
    def placed(cls, values: tuple[Any, ...], devices: tuple[Device, ...]) -> Self:
        """Makes a value of components that are known to be on `devices`, without checking."""
        value = cls.__new__(cls)
        value._values = values
        value._devices = devices
        return value

    @property
    def values(self) -> tuple[Any, ...]:
        """The components, by replica id."""
        return self._values

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of each component, by replica id."""
        if self._devices is None:
            # One tuple for many values, so that they are quickly seen to be at the same places.
            self._devices = slots = cpu_slots(len(self._values))
            if any(isinstance(value, Tensor) and value.is_cuda for value in self._values):
                self._devices = tuple(
                    resolve(value.device) if isinstance(value, Tensor) and value.is_cuda else slot
                    for value, slot in zip(self._values, slots, strict=True)
                )
        return self._devices

    def select(self, replica_id: int) -> Any:
        """Returns the component of a replica.

        Args:
            replica_id: The number of the replica on this worker.

        Raises:
            ReplicaMismatchError: If there is no component for it.
        """
        values = self.values
        if type(replica_id) is not int:
            replica_id = check_int("replica_id", replica_id)
        if not 0 <= replica_id < len(values):
            raise ReplicaMismatchError(
                f"A {type(self).__name__} of {len(values)} values has none for replica "
                f"{replica_id}. Give it one value per replica."
            )
        return values[replica_id]

    def __repr__(self) -> str:
        lines = [
            f"  {replica_id} on {device}: {value!r}"
            for replica_id, (value, device) in enumerate(
                zip(self.values, self.devices, strict=True)
            )
        ]
        return "\n".join([f"{type(self).__name__}:", *lines])


class PerReplica(TensorLike, DistributedValues):
    """Values that may differ from replica to replica, such as a loss or a gradient.

    Inside `run`, it can be used as one tensor: each replica sees its own component. Outside `run`,
    using it as one tensor raises an `UnsupportedError`. See `DistributedValues` for the arguments.

    Attributes:
        counts: How many samples each replica had: the replicas of all workers, while the components
            are those of this one. Input has them, and what a `run` with an uneven batch returns.
            A component whose replica had none is left out when values are reduced or gathered.
            None if the number of samples is not known, or if all had the same number.
        is_input: Whether this is a part of a batch that was split.
        origin: In an elastic job, where it comes from; otherwise None.
    """

    __slots__ = ("counts", "is_input", "origin")

    def __init__(self, values: Iterable[Any], devices: Sequence[DeviceLike] | None = None) -> None:
        super().__init__(values, devices)
        self.counts: tuple[int, ...] | None = None
        self.is_input = False
        self.origin: Origin | None = None

    @classmethod
    def placed(
        cls,
        values: tuple[Any, ...],
        devices: tuple[Device, ...],
        counts: tuple[int, ...] | None = None,
        *,
        is_input: bool = False,
    ) -> Self:
        value = super().placed(values, devices)
        value.counts = counts
        value.is_input = is_input
        value.origin = None
        return value

    def note_origin(
        self, generation: int, of_all: tuple[Any, ...] | None, step: Any = None
    ) -> None:
        """Notes where the value comes from, as it is now. See `Origin`."""
        self.origin = Origin(generation, tuple(map(version_of, self._values)), of_all, step)

    @property
    def known_everywhere(self) -> tuple[Any, ...] | None:
        """The components of all replicas, if they are known and nobody has written to these."""
        return None if self.origin is None or not self.can_be_laid_out else self.origin.of_all

    @property
    def can_be_laid_out(self) -> bool:
        """Whether workers can go on with it when they have got other replicas."""
        origin = self.origin
        if origin is None or (origin.of_all is None and origin.step is None):
            return False
        return origin.versions == tuple(map(version_of, self._values))

    def value(self) -> Any:
        """Returns the component of the current replica.

        Raises:
            UnsupportedError: If called outside `run`.
        """
        replica_id = replica_seen()
        if replica_id is None:
            raise UnsupportedError(f"{self._not_one('was used as one tensor')}")
        return self.select(replica_id)

    def _missing(self, name: str) -> AttributeError:
        if replica_seen() is None and name == "backward":
            return UnsupportedAttributeError(
                "`backward()` of a PerReplica was called outside `run`. Call `loss.backward()` of "
                "each replica's loss, and `optimizer.step()`, in the function that you `run`."
            )
        if replica_seen() is None and not name.startswith("_") and hasattr(Tensor, name):
            return UnsupportedAttributeError(self._not_one(f"was asked for `{name}`"))
        return super()._missing(name)

    def _not_one(self, what: str) -> str:
        return (
            f"A {type(self).__name__} {what} outside `run`, but it holds {len(self.values)} "
            'values, one per replica. Make one tensor of them with `strategy.reduce("MEAN", x)` or '
            "`strategy.gather(x, axis=0)`, or call it in the function that you `run`."
        )


class Mirrored(TensorLike, DistributedValues):
    """Values that are the same on every replica, such as a reduced gradient.

    It can be used as one tensor. A replica sees its own component; code outside `run` sees the
    first. See `DistributedValues` for the arguments.
    """

    __slots__ = ()

    def value(self) -> Any:
        """Returns the component that the running code sees."""
        return self.select(replica_seen() or 0)


def components_of(value: Any) -> tuple[Any, ...]:
    """Returns the components of a distributed value. Any other value is its only component."""
    return value.values if isinstance(value, DistributedValues) else (value,)


def version_of(value: Any) -> int:
    """Returns how often a tensor has been written to, as far as torch counts it."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _checked(devices: Sequence[DeviceLike], num_values: int) -> tuple[Device, ...]:
    resolved = tuple(resolve(device) for device in check_iterable("devices", devices))
    if len(resolved) != num_values:
        raise ReplicaMismatchError(
            f"Each value needs one device, got {num_values} values and {len(resolved)} devices: "
            f"{', '.join(map(str, resolved)) or 'none'}."
        )
    return resolved
