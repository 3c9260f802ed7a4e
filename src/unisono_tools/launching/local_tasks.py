"""The tasks of a TF_CONFIG cluster that run on this host."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.cluster import Address, ClusterSpec
from unisono.errors import ClusterError
from unisono_tools.processes import free_ports


@dataclass(frozen=True)
class LocalTask:
    """A task to start here.

    Attributes:
        name: The prefix of its output.
        tf_config: Its TF_CONFIG.
    """

    name: str
    tf_config: str


def local_tasks(spec: ClusterSpec, *, all_local: bool) -> list[LocalTask]:
    """Returns the tasks whose addresses belong to this host.

    Args:
        spec: The cluster.
        all_local: Whether to start the tasks of all hosts here, at free ports of this host.
    """
    if not spec:
        raise ClusterError(
            'There is no cluster in TF_CONFIG. Write it like {"cluster": {"worker": '
            '["localhost:2222", "localhost:2223"]}}, or unset TF_CONFIG and give -n.'
        )
    if all_local:
        spec = _moved_here(spec)
    tasks = [
        _task(spec, job, index)
        for job in spec.jobs
        for index in spec.task_indices(job)
        if is_of_this_host(Address.parse(spec.task_address(job, index)).host)
    ]
    if not tasks:
        raise ClusterError(
            f"No task of the cluster is on this host, {socket.gethostname()}: {spec.as_dict()}. "
            "Start the command on the hosts of the cluster, or give --all-local to try it here."
        )
    return tasks


def is_of_this_host(host: str) -> bool:
    """Returns whether a name or an IP address belongs to this host: whether one can bind to it."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: Sequence[object]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as one:
            one.bind(tuple(address))
    except OSError:
        return False
    return True


def _moved_here(spec: ClusterSpec) -> ClusterSpec:
    ports = iter(free_ports(sum(map(spec.num_tasks, spec.jobs))))
    return ClusterSpec(
        {job: [f"127.0.0.1:{next(ports)}" for _ in spec.task_indices(job)] for job in spec.jobs}
    )


def _task(spec: ClusterSpec, job: str, index: int) -> LocalTask:
    task = {"type": job, "index": index}
    return LocalTask(f"{job} {index}", json.dumps({"cluster": spec.as_dict(), "task": task}))
