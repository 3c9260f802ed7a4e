"""The configuration object of `configure` and `update_config_proto`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from unisono.cluster import ClusterSpec
from unisono.cluster.spec import rank_of
from unisono.devices import Device, resolve
from unisono.errors import ClusterError

_TASK = re.compile(r"/job:(\w+)(?:/replica:\d+)?/task:(\d+)(?:/(?:device:)?(\w+:\d+))?")


@dataclass
class ConfigProto:
    """What a run is configured with; `configure` both reads and writes it.

    Attributes:
        collective_group_leader: The task at whose address the workers meet, such as
            `/job:worker/replica:0/task:0`. "" means the chief.
        device_filters: What this worker sees: whole tasks, such as `/job:worker/task:1`, or single
            devices of them, `/job:worker/task:1/device:GPU:0`. Empty means everything.
        timeout_seconds: How long a collective may wait for other workers. None means five minutes.
    """

    collective_group_leader: str = ""
    device_filters: list[str] = field(default_factory=list)
    timeout_seconds: float | None = None

    def leader_rank(self, spec: ClusterSpec) -> int:
        """Returns the rank of the group leader in the cluster `spec`."""
        if not self.collective_group_leader:
            return 0
        task_type, task_id, _ = _parse(self.collective_group_leader)
        return rank_of(spec, task_type, task_id)

    def visible(
        self, devices: tuple[Device, ...], task_type: str, task_id: int
    ) -> tuple[Device, ...]:
        """Returns those `devices` of task `task_id` of `task_type` that the filters let through."""
        filters = [_parse(text) for text in self.device_filters]
        own = [device for job, task, device in filters if (job, task) == (task_type, task_id)]
        if not filters or None in own:
            return devices
        named = {resolve(name) for name in own if name is not None}
        return tuple(device for device in devices if device in named)


def _parse(text: str) -> tuple[str, int, str | None]:
    match = _TASK.fullmatch(text)
    if match is None:
        raise ClusterError(
            f"Cannot read the device filter {text!r}. Write a task as '/job:worker/task:0', and a "
            "device as '/job:worker/task:0/device:GPU:1'."
        )
    return match[1], int(match[2]), match[3]
