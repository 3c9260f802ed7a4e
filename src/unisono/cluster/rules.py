"""Who is chief, how many workers there are, and which one this is.

The tasks `chief`, `worker` 0, `worker` 1, ... form one row in this order. An `evaluator` stands
alone: it is no part of the row, need not be in the spec, and is the chief of its own work.
"""

from __future__ import annotations

from unisono.cluster.spec import ClusterSpec
from unisono.errors import ClusterError

JOBS = ("chief", "worker", "evaluator", "ps")
_AT_MOST_ONE = ("chief", "evaluator")


def validate(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> None:
    """Checks that the spec has known jobs and that the task is one of them."""
    _check_jobs(spec)
    if not spec and task_type is None and task_id is None:
        return
    if task_type is None or task_id is None:
        raise ClusterError(
            "Each process of a cluster must know which task it is, but here the task type is "
            f"{task_type!r} and the task id {task_id!r}. Give both."
        )
    _check_task(spec, task_type, task_id)


def is_chief(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> bool:
    """Returns whether this task writes checkpoints and summaries.

    It is the chief, or worker 0 of a cluster without a chief, or an evaluator, or a process that
    is alone.
    """
    validate(spec, task_type, task_id)
    if task_type == "worker":
        return task_id == 0 and "chief" not in spec.jobs
    return task_type != "ps"


def worker_count(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> int:
    """Returns how many tasks train together with this one, itself included."""
    validate(spec, task_type, task_id)
    _refuse_parameter_server(task_type)
    if not spec or task_type == "evaluator":
        return 1
    return _count(spec, "chief") + _count(spec, "worker")


def id_in_cluster(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> int:
    """Returns the place of this task in the row of chief and workers; 0 for one that is alone."""
    validate(spec, task_type, task_id)
    _refuse_parameter_server(task_type)
    if task_type == "worker" and task_id is not None:
        return task_id + _count(spec, "chief")
    return 0


def collective_leader(spec: ClusterSpec, task_type: str | None, task_id: int | None) -> str:
    """Returns the device name of the first task in the row, or "" for a process that is alone."""
    validate(spec, task_type, task_id)
    _refuse_parameter_server(task_type)
    if not spec or task_type == "evaluator":
        return ""
    return f"/job:{leading_job(spec)}/replica:0/task:0"


def leading_job(spec: ClusterSpec) -> str:
    """Returns the job whose task 0 is the first in the row."""
    return "chief" if "chief" in spec.jobs else "worker"


def _check_jobs(spec: ClusterSpec) -> None:
    unknown = [job for job in spec.jobs if job not in JOBS]
    if unknown:
        raise ClusterError(
            f"The jobs of a cluster are {', '.join(JOBS)}; the spec also has {', '.join(unknown)}. "
            "Remove it from the spec."
        )
    for job in _AT_MOST_ONE:
        if _count(spec, job) > 1:
            raise ClusterError(
                f"A cluster has at most one {job}, but the spec has {_count(spec, job)}: "
                f"{spec.job_tasks(job)}. Keep one of them."
            )


def _check_task(spec: ClusterSpec, task_type: str, task_id: int) -> None:
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
    num_tasks = max(_count(spec, task_type), 1)
    if not 0 <= task_id < num_tasks:
        raise ClusterError(
            f"The tasks of the job {task_type!r} are numbered 0 to {num_tasks - 1}; this process "
            f"is task {task_id}. Give it one of these numbers, or add a task to the cluster."
        )


def _refuse_parameter_server(task_type: str | None) -> None:
    if task_type == "ps":
        raise ClusterError(
            "A task 'ps' takes no part in synchronous training. Start no script for it, and leave "
            "the job out of the cluster."
        )


def _count(spec: ClusterSpec, job: str) -> int:
    return spec.num_tasks(job) if job in spec.jobs else 0
