"""One type for a device, which reads the spellings of TensorFlow and torch."""

from __future__ import annotations

import functools
import re
from typing import ClassVar, TypeAlias

import torch

from unisono.arguments import in_words
from unisono.errors import DeviceError

DeviceLike: TypeAlias = "Device | str | torch.device"

_TYPES = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda"}
_PLACE = re.compile(r"(?:device:)?([a-z]+)(?::(\d+))?(?:#(\d+))?", re.IGNORECASE)
_JOB = re.compile(r"job:([A-Za-z][A-Za-z0-9_]*)")
_NUMBER = re.compile(r"(replica|task):(\d+)")
_EXAMPLES = "'cpu:0', 'cuda:1', '/gpu:0' or '/job:worker/task:1/device:GPU:0'"


class Device:
    """Where a replica computes. It prints as in torch: `cpu:1`, `cuda:0`.

    A CPU device is a *replica slot*: every index is valid and all of them share the host's memory.
    Several replicas on one GPU are `cuda:0`, `cuda:0#1`, `cuda:0#2` and so on. Two devices with the
    same name are the same object, so they compare and hash by identity.

    Attributes:
        type: "cpu" or "cuda".
        index: Its number, from 0.
        job: The job of the task that it belongs to, such as "worker"; None for this process.
        task: The number of that task.
        slot: The number among the replicas that share the device, from 0.
    """

    __slots__ = ("__weakref__", "index", "job", "slot", "task", "type")

    _known: ClassVar[dict[tuple[str, int, str | None, int | None, int], Device]] = {}

    type: str
    index: int
    job: str | None
    task: int | None
    slot: int

    def __new__(
        cls,
        type: str,
        index: int,
        job: str | None = None,
        task: int | None = None,
        slot: int = 0,
    ) -> Device:
        """Returns the one `Device` of that name; `Device.parse` reads a spelling."""
        if not isinstance(type, str) or type not in _TYPES or not _is_number(index):
            raise DeviceError(
                "A device has the type 'cpu' or 'cuda' and an index of 0 or more, got "
                f"{in_words(type)}, {in_words(index)}."
            )
        if not _is_number(slot):
            raise DeviceError(f"The slot of a device is a number, got {in_words(slot)}.")
        if not (job is None or isinstance(job, str)) or not (task is None or _is_number(task)):
            raise DeviceError(
                "The job of a device is a string or None, and its task is a number or None, got "
                f"{in_words(job)}, {in_words(task)}."
            )
        name = _TYPES[type], index, job, task, slot
        device = super().__new__(cls)
        for attribute, part in zip(("type", "index", "job", "task", "slot"), name, strict=True):
            object.__setattr__(device, attribute, part)
        return cls._known.setdefault(name, device)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"A device never changes, so `{name}` cannot be set. Make another one."
        )

    @classmethod
    def parse(cls, spec: object, default: object = None) -> Device:
        """Reads a device.

        Args:
            spec: A spelling of TensorFlow or torch, a `torch.device` or a `Device`.
            default: Where job and task come from if `spec` has none.

        Raises:
            DeviceError: If it cannot be read.

        >>> Device.parse("/gpu:1"), Device.parse("/cpu:0", default="/job:worker/task:1")
        (cuda:1, /job:worker/task:1/device:cpu:0)
        """
        if isinstance(spec, Device):
            device = spec
        elif isinstance(spec, torch.device):
            device = _parse(str(spec))
        elif isinstance(spec, str):
            device = _parse(spec)
        else:
            raise DeviceError(
                f"A device is a name such as {_EXAMPLES} or a `torch.device`, "
                f"got {in_words(spec)} of type {type(spec).__name__}."
            )
        if default is None or device.job is not None:
            return device
        base = cls.parse(default)
        return cls(device.type, device.index, base.job, base.task, device.slot)

    def __repr__(self) -> str:
        name = f"{self.type}:{self.index}" + (f"#{self.slot}" if self.slot else "")
        if self.job is None:
            return name
        return f"/job:{self.job}/task:{self.task}/device:{name}"

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Device, (self.type, self.index, self.job, self.task, self.slot)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@functools.lru_cache(maxsize=4096)
def _parse(spec: str) -> Device:
    kind: str | None = None
    index, job, task, slot = 0, None, None, 0
    for part in spec.strip("/").split("/"):
        if (match := _JOB.fullmatch(part)) and job is None:
            job = match[1]
        elif (match := _NUMBER.fullmatch(part)) and (match[1] == "replica" or task is None):
            task = int(match[2]) if match[1] == "task" else task
        elif (match := _PLACE.fullmatch(part)) and match[1].lower() in _TYPES and kind is None:
            kind = _TYPES[match[1].lower()]
            index, slot = int(match[2] or 0), int(match[3] or 0)
        else:
            raise DeviceError(
                f"Cannot read {in_words(part)} in the device name {in_words(spec)}. Write "
                f"{_EXAMPLES}."
            )
    if task is not None and job is None:
        raise DeviceError(f"The device name {spec!r} has a task but no job. Write {_EXAMPLES}.")
    if job == "localhost":
        # TensorFlow's full spelling of a device of this host.
        job, task = None, None
    elif job is not None and task is None:
        task = 0
    # As in TensorFlow, a name that gives only the job and task means the host's first CPU.
    return Device(kind or "cpu", index, job, task, slot)


@functools.lru_cache(maxsize=256)
def cpu_slots(num_slots: int) -> tuple[Device, ...]:
    """Returns `cpu:0` to `cpu:num_slots - 1`."""
    return tuple(Device("cpu", index) for index in range(num_slots))
