"""The variable TF_CONFIG: a cluster and a task, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unisono.cluster.environment import LauncherVariables
from unisono.cluster.resolvers.resolver import KnownCluster
from unisono.cluster.rules import validate
from unisono.cluster.spec import ClusterSpec
from unisono.errors import ClusterError

TF_CONFIG = "TF_CONFIG"
_EXAMPLE = (
    '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'
)


class TFConfigClusterResolver(KnownCluster):
    """The cluster that TF_CONFIG describes; without TF_CONFIG, a process that is alone.

    TF_CONFIG is a JSON object: `cluster` holds addresses by job name, `task` a `type` and an
    `index`; `rpc_layer`, `session_master` and `environment` may be there.

    Args:
        task_type: Counts instead of the task type that TF_CONFIG gives.
        task_id: Counts instead of the task index that TF_CONFIG gives.
        rpc_layer: Counts instead of that of TF_CONFIG.
        environment: Counts instead of that of TF_CONFIG.
        environ: The environment variables; those of this process if not given.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        found = TFConfig.read(LauncherVariables("a TF_CONFIG cluster", environ).find(TF_CONFIG))
        super().__init__(
            found.task_type if task_type is None else task_type,
            found.task_id if task_id is None else task_id,
            found.rpc_layer if rpc_layer is None else rpc_layer,
            found.environment if environment is None else environment,
        )
        self._spec = found.spec
        self._session_master = found.session_master
        try:
            validate(self._spec, self.task_type, self.task_id)
        except ClusterError as error:
            raise ClusterError(f"The task in TF_CONFIG is not usable. {error}") from None

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """See `ClusterResolver.master`; the `session_master` of TF_CONFIG comes first."""
        return self._session_master or super().master(task_type, task_id, rpc_layer)


@dataclass(frozen=True)
class TFConfig:
    """What TF_CONFIG holds."""

    spec: ClusterSpec
    task_type: str | None
    task_id: int | None
    rpc_layer: str | None
    session_master: str
    environment: str

    @staticmethod
    def read(text: str | None) -> TFConfig:
        """Reads the JSON text; None and an empty text are a process that is alone."""
        config = _parse(text or "{}")
        task = _object(config, "task")
        # A task without a cluster is how some schedulers describe a job of one process.
        spec = ClusterSpec(_object(config, "cluster"))
        return TFConfig(
            spec=spec,
            task_type=_text(task, "type") if spec else None,
            task_id=_index(task) if spec else None,
            rpc_layer=_text(config, "rpc_layer"),
            session_master=_text(config, "session_master") or "",
            environment=_text(config, "environment") or "",
        )


def _parse(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterError(
            f"TF_CONFIG is not JSON ({error}). Found {text[:200]!r}; write it like {_EXAMPLE}."
        ) from None
    if not isinstance(config, dict):
        raise ClusterError(f"TF_CONFIG must be a JSON object such as {_EXAMPLE}; found {config!r}.")
    return config


def _object(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise ClusterError(
            f"`{key}` in TF_CONFIG must be an object, as in {_EXAMPLE}; found {found!r}."
        )
    return found


def _text(config: Mapping[str, Any], key: str) -> str | None:
    found = config.get(key)
    if found is not None and not isinstance(found, str):
        raise ClusterError(f"`{key}` in TF_CONFIG must be a string; found {found!r}.")
    return found


def _index(task: Mapping[str, Any]) -> int | None:
    found = task.get("index")
    if found is None:
        return None
    try:
        if isinstance(found, (int, str)) and not isinstance(found, bool):
            return int(found)
    except ValueError:
        pass
    raise ClusterError(
        f"The `index` of `task` in TF_CONFIG must be a whole number; found {found!r}."
    )
