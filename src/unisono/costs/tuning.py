"""The file that `unisono tune` writes and that Unisono reads to choose algorithms."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unisono.algorithms import Schedule
from unisono.costs.model import Link, schedule_line
from unisono.errors import TuningError
from unisono.packing import BYTES_PER_PACK, Line
from unisono.system import TUNING, is_tuned, processor, tuning_path

_FORMAT = 2
_log = logging.getLogger("unisono")


class Run(NamedTuple):
    """How long the all-reduce that Unisono runs took between all ranks of a cluster."""

    num_hosts: int
    ranks_per_host: int
    times: tuple[tuple[int, float], ...]

    @staticmethod
    def read(content: Any) -> Run:
        """Reads what JSON makes of a run."""
        hosts, ranks, times = content
        run = Run(int(hosts), int(ranks), tuple((int(size), float(s)) for size, s in times))
        sizes, seconds = zip(*run.times, strict=True)
        if min(run[:2]) < 1 or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"the run {content!r}")
        if not (min(seconds) > 0 and max(seconds) < math.inf):
            raise ValueError(f"the seconds {seconds!r}")
        return run


@dataclass(frozen=True)
class Tuning:
    """Constants that were measured, and where.

    Attributes:
        memory: A sum inside one memory: its latency, and bytes read and written per second.
        devices: A copy between the devices of one process.
        inside: Between processes of one host, through shared memory.
        loopback: Between processes of one host, through Gloo.
        between: Between hosts, through Gloo.
        sum_rate: Bytes per second that a process reads and writes in a sum for others.
        tcp: Between hosts, through Unisono's own TCP connections.
    """

    memory: Link
    devices: Link
    inside: Link | None
    loopback: Link | None
    between: Link | None
    sum_rate: float
    machine: Mapping[str, Any]
    date: str
    version: str
    tcp: Link | None = None
    runs: tuple[Run, ...] = ()

    @property
    def is_tcp_faster(self) -> bool:
        """Whether TCP connections of Unisono's own were measured to be faster than Gloo."""
        if self.tcp is None or self.between is None:
            return False
        return self.tcp.seconds(1, BYTES_PER_PACK) < self.between.seconds(1, BYTES_PER_PACK)

    def line(self, schedule: Schedule, memories: Sequence[Hashable]) -> Line:
        """Returns the cost of a schedule between devices of one process that have memories."""
        return schedule_line(schedule, memories, self.devices, self.memory)

    def to_text(self) -> str:
        """Returns the content of the file."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def from_text(text: str, where: str = "The tuning of rank 0") -> Tuning:
        """Reads what `to_text` has written."""
        try:
            content = json.loads(text)
            found = content.pop("format")
            links = {name: content.pop(name) for name in LINKS}
            if found != _FORMAT:
                raise ValueError(f"format {found}, but this version reads {_FORMAT}")
            if links["memory"] is None or links["devices"] is None:
                raise ValueError("sums and copies were not measured")
            rate = content["sum_rate"]
            if not (isinstance(rate, float) and 0 < rate < math.inf):
                raise ValueError(f"a rate of sums of {rate!r} B/s")
            if not isinstance(content["machine"], dict):
                raise ValueError(f"the machine {content['machine']!r}")
            runs = tuple(map(Run.read, content.pop("runs", ())))
            made = {name: None if one is None else Link(**one) for name, one in links.items()}
            return Tuning(**made, runs=runs, **content)  # type: ignore[arg-type]
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise TuningError(
                f"{where} is not a tuning file of this version ({type(error).__name__}: {error}). "
                f"Write a new one with `unisono tune`, or set {TUNING}=off."
            ) from error


LINKS = ("memory", "devices", "inside", "loopback", "between", "tcp")


def read_tuning(path: Path) -> Tuning:
    """Reads a tuning file of any machine."""
    try:
        # Reading a pipe, for example, would wait for a writer.
        if path.exists() and not path.is_file():
            raise OSError("it is not a regular file")
        text = path.read_text()
    except (OSError, ValueError) as error:
        raise TuningError(
            f"The tuning file {path} cannot be read: {error}. Write it with `unisono tune --output "
            f"{path}`, or set {TUNING}=off."
        ) from error
    return Tuning.from_text(text, where=f"{path}")


def current_tuning() -> Tuning | None:
    """Returns the constants of this machine, or None if it was not tuned.

    A file that UNISONO_TUNING names must be of this machine. The file in the user's cache never
    stops a strategy: if it is broken, unreadable or of another machine, this logs one line.
    """
    if not is_tuned():
        return None
    try:
        path = tuning_path()
        tuning = read_tuning(path)
        found, here = tuning.machine, this_machine_in_words().items()
        if differing := ", ".join(
            f"{fact} {found.get(fact)!r}, here {value!r}"
            for fact, value in here
            if found.get(fact) != value
        ):
            raise TuningError(
                f"{path} was measured on another machine: {differing}. Run `unisono tune` here, "
                f"or set {TUNING}=off."
            )
    except TuningError as error:
        if os.environ.get(TUNING):
            raise
        _log.warning("Goes on untuned. %s", error)
        return None
    return tuning


def this_machine_in_words() -> dict[str, Any]:
    """Returns what the constants depend on, as text."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cpu": processor(), "cores": os.cpu_count(), "gpus": gpus}
