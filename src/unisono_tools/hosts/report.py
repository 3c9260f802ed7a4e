"""What there is on a host, and what Unisono would choose there."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch.cuda import nccl

from unisono.communicators.choice import choose
from unisono.communicators.hosts import Layout
from unisono.costs import BYTES_PER_PACK, Tuning, current_tuning, tuning_path
from unisono.devices import (
    Device,
    Groups,
    Topology,
    as_recorded,
    cpu_slots,
    default_devices,
    near_groups,
    this_machine,
)
from unisono.devices.groups import topology_of
from unisono.errors import DeviceError, TuningError
from unisono.kernels import native_core
from unisono.kernels.gpu import triton_status
from unisono.options import CommunicationImplementation
from unisono.reductions import choose_cross_device_ops
from unisono.system import TUNING
from unisono.tracing.lock_waits import has_lock
from unisono_tools.tables import spell_seconds

NATIVE, NCCL, FREE_THREADS = "native core", "NCCL", "free threads"

# One letter per worker. Workers with the same letter are on one host.
_JOBS = {
    "2 workers on this host": "aa",
    "2 workers on each of 2 hosts": "aabb",
    "1 worker on each of 2 hosts": "ab",
}


class Engine(NamedTuple):
    """A library that computes or communicates: whether it is there, and details in words."""

    is_found: bool
    detail: str


class Chosen(NamedTuple):
    """What Unisono chooses, and why."""

    what: str
    reason: str


class Tuned(NamedTuple):
    """The constants that `unisono tune` measured, or None, and where they come from, in words."""

    constants: Tuning | None
    detail: str

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values."""
        constants = None if self.constants is None else json.loads(self.constants.to_text())
        return {"constants": constants, "detail": self.detail}

    @staticmethod
    def from_json(recorded: Mapping[str, Any]) -> Tuned:
        """Reads what `to_json` returned."""
        if not isinstance(recorded, Mapping):
            raise DeviceError(
                "The tuning of a recorded host is an object with `constants` and `detail`, got "
                f"{recorded!r}."
            )
        constants = recorded.get("constants")
        tuning = (
            None if constants is None else Tuning.from_text(json.dumps(constants), "The tuning")
        )
        return Tuned(tuning, recorded.get("detail", "the recording does not say"))


@dataclass(frozen=True)
class HostReport:
    """Everything that `unisono info` shows.

    Attributes:
        versions: The versions of libraries; None for what is not installed.
        engines: The libraries that compute and communicate. Empty if not recorded.
        topology: The GPUs and their links.
        num_cores: The number of CPU cores; None if not recorded.
        devices: The devices that a strategy uses by default.
        groups: The groups of the hierarchical copy, by position in `devices`.
        tuned: The measured costs of the links, which the choices use.
        processes: Whether one process or several would train on all devices.
        reductions: What would reduce inside a worker, by its devices.
        communicators: What would carry the collectives of a job, by how many workers it has.
    """

    versions: Mapping[str, str | None]
    engines: Mapping[str, Engine]
    topology: Topology
    num_cores: int | None
    devices: tuple[Device, ...]
    groups: Groups
    tuned: Tuned
    processes: Chosen
    reductions: Mapping[str, Chosen]
    communicators: Mapping[str, Chosen]

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values. `recorded_host` reads it back."""
        return {
            "versions": dict(self.versions),
            "engines": {name: engine._asdict() for name, engine in self.engines.items()},
            "topology": self.topology.to_json(),
            "num_cores": self.num_cores,
            "devices": [str(device) for device in self.devices],
            "groups": [[str(self.devices[i]) for i in group] for group in self.groups],
            "tuning": self.tuned.to_json(),
            "processes": self.processes._asdict(),
            "reductions": {devices: one._asdict() for devices, one in self.reductions.items()},
            "communicators": {job: one._asdict() for job, one in self.communicators.items()},
        }


def this_host() -> HostReport:
    """Reports on this host."""
    return _report(_versions(), _engines(), os.cpu_count(), _tuned())


def recorded_host(recording: Mapping[str, Any]) -> HostReport:
    """Reports on the host of a recording: a whole report, or only a topology.

    The choices are computed again. If no engines are recorded, it assumes the native core and NCCL.
    """
    try:
        engines = {name: Engine(**engine) for name, engine in recording.get("engines", {}).items()}
    except (AttributeError, TypeError) as error:
        raise DeviceError(
            "The engines of a recorded host are an object with `is_found` and `detail` for each, "
            f"got {recording['engines']!r}."
        ) from error
    tuned = Tuned.from_json(recording.get("tuning", {}))
    with as_recorded(Topology.from_json(recording.get("topology", recording))):
        return _report(recording.get("versions", {}), engines, recording.get("num_cores"), tuned)


def _report(
    versions: Mapping[str, str | None],
    engines: Mapping[str, Engine],
    num_cores: int | None,
    tuned: Tuned,
) -> HostReport:
    has = {name: name not in engines or engines[name].is_found for name in (NATIVE, NCCL)}
    is_free = FREE_THREADS in engines and engines[FREE_THREADS].is_found
    devices = default_devices()
    reduced = {_in_words(some): some for some in (devices, cpu_slots(2))}
    tuning = tuned.constants
    return HostReport(
        versions,
        engines,
        topology_of(this_machine()),
        num_cores,
        devices,
        near_groups(devices),
        tuned,
        _processes(len(this_machine().gpus), num_cores, is_free=is_free),
        {words: _reduction(some, tuning, has_nccl=has[NCCL]) for words, some in reduced.items()},
        {job: _carrier(hosts, tuning, has_native_core=has[NATIVE]) for job, hosts in _JOBS.items()},
    )


def _processes(num_gpus: int, num_cores: int | None, *, is_free: bool) -> Chosen:
    """Chooses one process or many for a host. docs/one_process_or_many.md has the numbers."""
    if is_free:
        return Chosen("one process", "replicas run Python at the same time: it is free-threaded")
    if num_gpus > 1:
        return Chosen(
            "one process per GPU",
            f"the replicas of {num_gpus} GPUs would share one interpreter: `unisono launch` starts "
            "one process per GPU, and `unisono.function` captures its step, also in one process "
            "for all GPUs; if a step keeps each GPU busy for more than 30 ms, one process is as "
            "fast",
        )
    if num_gpus == 1:
        return Chosen("one process", "one GPU has one replica")
    if num_cores is not None and num_cores > 2:
        return Chosen(
            "one process",
            "`unisono.function` captures its step, which then needs no interpreter; for short "
            "steps that cannot be captured, `unisono launch -n R` is faster",
        )
    return Chosen("one process", "no more than two CPU replicas can run at the same time")


def _in_words(devices: tuple[Device, ...]) -> str:
    if len(devices) < 3:
        return " and ".join(map(str, devices))
    return f"{devices[0]} to {devices[-1]}"


def _reduction(devices: tuple[Device, ...], tuning: Tuning | None, *, has_nccl: bool) -> Chosen:
    ops, reason = choose_cross_device_ops(devices, has_nccl=has_nccl, tuning=tuning)
    return Chosen(type(ops).__name__, reason)


def _carrier(hosts: str, tuning: Tuning | None, *, has_native_core: bool) -> Chosen:
    choice = choose(
        Layout.of(hosts),
        has_native_core=has_native_core,
        implementation=CommunicationImplementation.AUTO,
        tuning=tuning,
    )
    reason = choice.why
    if choice.cost is not None:
        seconds = spell_seconds(choice.cost.seconds(BYTES_PER_PACK))
        reason += f"; {BYTES_PER_PACK >> 20} MiB are predicted to take {seconds}, as tuned"
    elif tuning is not None:
        reason += "; the links between hosts are not tuned"
    return Chosen(str(choice), reason)


def _tuned() -> Tuned:
    try:
        tuning = current_tuning()
    except TuningError as error:
        return Tuned(None, f"no strategy can be made: {error}")
    try:
        path = tuning_path()
    except TuningError as error:
        return Tuned(None, str(error))
    if tuning is not None:
        when = f"measured on {tuning.date} by Unisono {tuning.version}"
        return Tuned(tuning, f"{path}, {when}; it sets the choices and the sizes of packs")
    if os.environ.get(TUNING) == "off":
        return Tuned(None, f"{TUNING}=off is set, so no run reads one")
    if os.path.exists(path):
        return Tuned(None, f"{path} is of another machine or version: run `unisono tune`")
    return Tuned(None, "not tuned: run `unisono tune` to measure the links")


def _versions() -> dict[str, str | None]:
    has_nccl = distributed.is_nccl_available()
    return {
        "unisono": _installed("unisono"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "NCCL": ".".join(map(str, nccl.version())) if has_nccl else None,
        "triton": _installed("triton"),
        "MPI": _mpi_version(),
    }


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _mpi_version() -> str | None:
    """Returns the version line of `mpirun`, if there is one."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        return None
    try:
        told = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return mpirun
    return next(iter(told.stdout.splitlines()), mpirun)


def _engines() -> dict[str, Engine]:
    core = native_core()
    return {
        FREE_THREADS: _free_threads(),
        NATIVE: Engine(core.kernel is not None, core.status),
        "GPU kernels": _gpu_kernels(),
        NCCL: _backend(
            "for GPUs that are all different; adds in its own order",
            is_found=distributed.is_nccl_available(),
        ),
        "Gloo": _backend(
            "between hosts; adds in the order of the tree", is_found=distributed.is_gloo_available()
        ),
        "MPI": _mpi(),
    }


def _mpi() -> Engine:
    is_found = importlib.util.find_spec("mpi4py") is not None
    return Engine(is_found, "where mpirun starts the workers" if is_found else "needs mpi4py")


def _free_threads() -> Engine:
    if has_lock():
        return Engine(is_found=False, detail="replicas take turns to run Python")
    return Engine(is_found=True, detail="replicas run Python at the same time")


def _gpu_kernels() -> Engine:
    if not torch.cuda.is_available():
        return Engine(is_found=False, detail="torch sees no GPU")
    triton = triton_status()
    return Engine(triton.sums is not None, triton.status)


def _backend(use: str, *, is_found: bool) -> Engine:
    return Engine(is_found, use if is_found else "this torch was built without it")
