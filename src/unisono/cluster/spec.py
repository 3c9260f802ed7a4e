"""Which tasks make up a job, where they are, and which of them train together.

The tasks `chief`, `worker` 0, `worker` 1, ... form one row in this order, and their places in it
are the ranks. An `evaluator` stands alone: it is no part of the row, need not be in the spec, and
is the chief of its own work.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from unisono.arguments import check_int, in_words
from unisono.errors import ClusterError

JOBS = ("chief", "worker", "evaluator", "ps")
_AT_MOST_ONE = ("chief", "evaluator")
_ADDRESS = re.compile(
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.%\w]*:[^\]\s]*)\]|(?P<name>[^\s:/\[\]]+)):(?P<port>\d+)"
)


@dataclass(frozen=True)
class Address:
    """Where a task can be reached."""

    host: str
    port: int

    @staticmethod
    def parse(text: object) -> Address:
        """Reads `host:port` or `[IPv6]:port`."""
        match = _ADDRESS.fullmatch(text) if isinstance(text, str) else None
        if match is None or not 0 < int(match["port"]) < 65536:
            raise ClusterError(
                f"Cannot read the address {text!r}. Write 'host:port' with a port from 1 to 65535, "
                "and an IPv6 host in brackets: '[::1]:2222'."
            )
        return Address(match["ipv6"] or match["name"], int(match["port"]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def derived_port(name: str) -> int:
    """Returns the port that every worker of the job `name` computes alike.

    It is 12000 plus the CRC-32 of the name modulo 20000: below the ports that Linux gives out by
    itself, which start at 32768.
    """
    return 12000 + zlib.crc32(name.encode()) % 20000


Tasks: TypeAlias = "Sequence[str | None] | Mapping[int, str | None]"


class ClusterSpec:
    """The tasks of a cluster by job name, as in `tf.train.ClusterSpec`.

    A task whose address the launcher does not tell stands as None; only the address of the first
    one is needed.

    Args:
        cluster: Addresses by job name, `{"worker": ["host0:2222", "host1:2222"]}`, or another spec.
            The addresses of a job may also be given by task number, as in
            `{"worker": {1: "host1:2222"}}`, and then some tasks may be missing. Training needs
            all of them.
    """

    def __init__(self, cluster: ClusterSpec | Mapping[str, Tasks]) -> None:
        if isinstance(cluster, ClusterSpec):
            self._tasks: dict[str, dict[int, str | None]] = dict(cluster._tasks)
            return
        if not isinstance(cluster, Mapping):
            raise ClusterError(
                "A cluster is a dictionary of addresses by job name, such as "
                f"{{'worker': ['host0:2222', 'host1:2222']}}; got {in_words(cluster)}."
            )
        self._tasks = {job: _addresses(job, tasks) for job, tasks in cluster.items()}
        _check_that_addresses_differ(self._tasks)

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._tasks)

    def num_tasks(self, job_name: str) -> int:
        """Returns how many tasks the job `job_name` has."""
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the numbers of the tasks of the job `job_name`."""
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of the task `task_index` of the job `job_name`.

        Raises:
            ClusterError: If there is no such task, or its address is not known.
        """
        tasks = self._job(job_name)
        if check_int("task_index", task_index) not in tasks:
            is_dense = self.is_dense(job_name)
            known = f"0 to {len(tasks) - 1}" if is_dense else ", ".join(map(str, sorted(tasks)))
            raise ClusterError(
                f"The job {job_name!r} has the tasks {known}, not task {task_index}. Ask for "
                "one of these."
            )
        address = tasks[task_index]
        if address is None:
            raise ClusterError(
                f"The address of task {task_index} of {job_name!r} is not known: the launcher "
                "gives only the address of the first task. Ask for task 0, or use a `ClusterSpec` "
                "with all addresses."
            )
        return address

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Returns the addresses of the job `job_name`, by task number; None for missing tasks."""
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks) + 1)]

    def is_dense(self, job_name: str) -> bool:
        """Whether the tasks of the job `job_name` are numbered from 0 without a gap."""
        return self.task_indices(job_name) == list(range(self.num_tasks(job_name)))

    def as_dict(self) -> dict[str, list[str | None] | dict[int, str | None]]:
        """Returns the addresses by job name: a list, or a dict by number if tasks are missing."""
        return {
            job: self.job_tasks(job) if self.is_dense(job) else dict(sorted(tasks.items()))
            for job, tasks in self._tasks.items()
        }

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClusterSpec) and self._tasks == other._tasks

    def __hash__(self) -> int:
        return hash(
            frozenset((job, frozenset(tasks.items())) for job, tasks in self._tasks.items())
        )

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()})"

    def _job(self, name: str) -> dict[int, str | None]:
        if not isinstance(name, str) or name not in self._tasks:
            known = ", ".join(map(repr, self._tasks)) or "none"
            raise ClusterError(
                f"There is no job {in_words(name)} in the cluster; its jobs are: {known}. Ask for "
                "one of these."
            )
        return self._tasks[name]


def _addresses(job: object, tasks: object) -> dict[int, str | None]:
    if not isinstance(job, str) or not job:
        raise ClusterError(f"The name of a job is a string such as 'worker'; got {in_words(job)}.")
    if isinstance(tasks, str) or not isinstance(tasks, (Sequence, Mapping)) or not tasks:
        raise ClusterError(
            f"The tasks of the job {job!r} are a list of at least one address, such as "
            "['host0:2222', 'host1:2222'], or a dictionary of addresses by task number; got "
            f"{in_words(tasks)}."
        )
    if isinstance(tasks, Mapping):
        numbered = {_number(job, key): task for key, task in tasks.items()}
    else:
        numbered = dict(enumerate(tasks))
    return {
        index: None if task is None else str(Address.parse(task))
        for index, task in numbered.items()
    }


def _number(job: str, key: object) -> int:
    """Returns the number of a task; JSON has numbers as keys only in the form of texts."""
    is_number = isinstance(key, int) and not isinstance(key, bool) and key >= 0
    if is_number or (isinstance(key, str) and key.isascii() and key.isdigit()):
        return int(key)  # type: ignore[call-overload, no-any-return]
    raise ClusterError(
        f"The tasks of the job {job!r} are numbered with whole numbers of 0 or more; got {key!r}."
    )


def _check_that_addresses_differ(tasks: Mapping[str, Mapping[int, str | None]]) -> None:
    addresses = (address for job in tasks.values() for address in job.values())
    counts = Counter(address for address in addresses if address is not None)
    twice = sorted(address for address, count in counts.items() if count > 1)
    if twice:
        raise ClusterError(
            f"Every task needs its own address, but several tasks have {', '.join(twice)}. Give "
            "each another host or port."
        )


def validate(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> None:
    """Checks that the spec has known jobs and that the task is one of them."""
    unknown = [job for job in spec.jobs if job not in JOBS]
    if unknown:
        raise ClusterError(
            f"The jobs of a cluster are {', '.join(JOBS)}; the spec also has {', '.join(unknown)}. "
            "Remove it from the spec."
        )
    for job in _AT_MOST_ONE:
        if count(spec, job) > 1:
            raise ClusterError(
                f"A cluster has at most one {job}, but the spec has {count(spec, job)}: "
                f"{spec.job_tasks(job)}. Keep one of them."
            )
    if not spec and task_type is None and task_id is None:
        return
    if task_type is None or task_id is None:
        raise ClusterError(
            "Each process of a cluster must know which task it is, but here the task type is "
            f"{task_type!r} and the task id {task_id!r}. Give both."
        )
    if task_type not in JOBS:
        raise ClusterError(f"A task type is one of {', '.join(JOBS)}; got {task_type!r}.")
    if task_type not in spec.jobs and task_type != "evaluator":
        raise ClusterError(
            f"This process is a {task_type!r}, but the cluster has only the jobs "
            f"{', '.join(spec.jobs) or 'none'}. Add the job to the cluster, or give another task "
            "type."
        )
    if not isinstance(task_id, int) or isinstance(task_id, bool):
        raise ClusterError(f"A task id is a whole number; got {task_id!r}.")
    for job in ("worker", task_type):
        if job in spec.jobs and not spec.is_dense(job):
            raise ClusterError(
                f"The job {job!r} has only the tasks {', '.join(map(str, spec.task_indices(job)))}"
                ". List every task from 0 on, and write None for an address that you do not know."
            )
    # An evaluator that is not in the spec is the only one.
    num_tasks = max(count(spec, task_type), 1)
    if not 0 <= task_id < num_tasks:
        raise ClusterError(
            f"The tasks of the job {task_type!r} are numbered 0 to {num_tasks - 1}; this process "
            f"is task {task_id}. Give it one of these numbers, or add a task to the cluster."
        )


def rank_of(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> int:
    """Returns the place of a task in the row of chief and workers; 0 for one that is alone."""
    validate(spec, task_type, task_id)
    if task_type == "ps":
        raise ClusterError(
            "A task 'ps' takes no part in synchronous training. Start no script for it, and leave "
            "the job out of the cluster."
        )
    if task_type == "worker" and task_id is not None:
        return task_id + count(spec, "chief")
    return 0


def count(spec: ClusterSpec, job: str) -> int:
    """Returns how many tasks a job has, which need not be in the spec."""
    return spec.num_tasks(job) if job in spec.jobs else 0
