"""Runs a command in all workers of a job on this host, through torch's elastic agent."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import click
from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from unisono.cluster import Address, tf_config_cluster
from unisono.cluster.elastic.finding import JOIN, LAUNCHER
from unisono.communicators import JOB_TOKEN
from unisono.devices import this_machine
from unisono.errors import ClusterError
from unisono_tools.launching import worker_start
from unisono_tools.launching.agent import Departure
from unisono_tools.launching.board import Board, running_workers
from unisono_tools.launching.local_tasks import LocalTask, local_tasks
from unisono_tools.launching.replacements import Replacements
from unisono_tools.launching.worker_output import WorkerOutput, in_words

_LAST_LINES = 20
# This logger reports each worker that ends, and so does `_report`, in fewer words.
_LOG_OF_ENDS = "torch.distributed.elastic.multiprocessing.api"
# This one warns every five seconds that the host of the rendezvous is lost. An elastic job goes on.
_LOG_OF_HOSTS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"


class Job(NamedTuple):
    """What the command line asks for; see the options of `unisono launch`.

    Attributes:
        doors: Where workers of an elastic job are that runs already, and is to be joined.
    """

    num_workers: int | None
    num_hosts: tuple[int, int]
    host_rank: int | None
    endpoint: str | None
    rendezvous: dict[str, str]
    max_restarts: int
    is_elastic: bool
    grace_seconds: float
    cluster_file: Path | None
    all_local: bool
    doors: str = ""


def run_workers(job: Job, command: Sequence[str]) -> int:
    """Runs the workers of this host to their end, and returns the exit status of the launcher."""
    try:
        tasks = _tasks(job.num_workers, job.cluster_file, all_local=job.all_local)
        if tasks and job.num_hosts != (1, 1):
            raise ClusterError("TF_CONFIG already names the hosts: leave out --nnodes.")
        if job.is_elastic and job.num_hosts[1] > 1 and (doors := running_workers(_endpoints(job))):
            print(f"Joining the elastic job with workers at {doors}.", file=sys.stderr)
            # Its agent meets no other hosts.
            job = job._replace(num_hosts=(1, 1), host_rank=None, rendezvous={}, doors=doors)
        num_workers = len(tasks) or job.num_workers or num_gpu_workers()
        config = _config(num_workers, job)
    except ClusterError as error:
        raise click.UsageError(str(error)) from None
    config.max_restarts = 0 if job.is_elastic else job.max_restarts
    return _run(config, command, tasks, job)


def _tasks(
    num_workers: int | None, cluster_file: Path | None, *, all_local: bool
) -> list[LocalTask]:
    """Returns the tasks of TF_CONFIG, or none if it has no cluster."""
    text = os.environ.get("TF_CONFIG") if cluster_file is None else cluster_file.read_text()
    if not text:
        if all_local:
            raise ClusterError(
                "--all-local needs a cluster in TF_CONFIG or --tf-config-cluster. Without one, "
                "give the number of workers, for example -n 4."
            )
        return []
    tasks = local_tasks(tf_config_cluster(text), all_local=all_local)
    if num_workers not in (None, len(tasks)):
        raise ClusterError(
            f"TF_CONFIG has {len(tasks)} tasks on this host, but -n asks for {num_workers} "
            "workers. Leave out -n, or unset TF_CONFIG."
        )
    return tasks


def num_gpu_workers() -> int:
    """Returns the default number of workers: one per GPU that torch sees.

    Raises:
        ClusterError: If there is no GPU.
    """
    num_gpus = len(this_machine().gpus)
    if num_gpus == 0:
        raise ClusterError(
            "torch sees no GPU on this host, so the number of workers is not known. Give -n, for "
            "example -n 4, or a cluster in TF_CONFIG or --tf-config-cluster."
        )
    return num_gpus


def _config(num_workers: int, job: Job) -> LaunchConfig:
    """How the agents of all hosts find each other."""
    least, most = job.num_hosts
    config = LaunchConfig(
        min_nodes=least, max_nodes=most, nproc_per_node=num_workers, rdzv_backend="c10d"
    )
    config.rdzv_configs = dict(job.rendezvous)
    if most == 1:
        # The agent takes a free port, so that launches do not connect to each other by accident.
        config.rdzv_endpoint, config.local_addr = "localhost:0", "localhost"
        config.run_id = uuid.uuid4().hex
        return config
    config.rdzv_endpoint = str(_endpoints(job)[0])
    config.run_id = f"unisono-{config.rdzv_endpoint}"
    if job.host_rank is not None:
        if least != most:
            raise ClusterError(
                f"--node-rank needs a fixed number of hosts, but --nnodes is {least}:{most}. Leave "
                "out --node-rank."
            )
        if job.host_rank >= most:
            raise ClusterError(f"--node-rank {job.host_rank} must be less than --nnodes {most}.")
        config.rdzv_backend = "static"
        config.rdzv_configs["rank"] = job.host_rank
    return config


def _endpoints(job: Job) -> list[Address]:
    """Where the hosts find each other: the first host, in elastic jobs also others."""
    if job.endpoint is None:
        raise ClusterError("Several hosts need --rdzv-endpoint: give an address of the first host.")
    texts = job.endpoint.split(",") if job.is_elastic else [job.endpoint]
    return [Address.parse(text) for text in texts]


def _run(config: LaunchConfig, command: Sequence[str], tasks: Sequence[LocalTask], job: Job) -> int:
    """Runs the workers to their end, and returns the exit status of the launcher."""
    departure = Departure(job.grace_seconds)
    plan = {
        "command": command,
        "tf_configs": [task.tf_config for task in tasks],
        "launcher": os.getpid(),
    }
    variables = {worker_start.PLAN: json.dumps(plan), **_thread_limit(config.nproc_per_node)}
    is_alone = config.max_nodes == 1 and not job.doors and _are_all(tasks)
    if is_alone and not os.environ.get(JOB_TOKEN):
        # Launchers of several hosts have no private way to agree on a secret.
        variables[JOB_TOKEN] = secrets.token_hex(32)
    if config.max_nodes > 1:
        # An agent that joins later would wait for an address that the others do not send again.
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if "TORCH_LOGS" not in os.environ:
        logging.getLogger(_LOG_OF_ENDS).setLevel(logging.CRITICAL)
        if job.is_elastic:
            logging.getLogger(_LOG_OF_HOSTS).setLevel(logging.ERROR)
    names = [task.name for task in tasks]
    with (
        _ctrl_c_heard_while_waiting_for_hosts(),
        tempfile.TemporaryDirectory(prefix="unisono-launch-") as folder,
        _environment(variables),
    ):
        output = WorkerOutput(Path(folder), names, sys.stdout.buffer, sys.stderr.buffer)
        config.logs_specs = output
        known: dict[str, str] = {}
        if job.is_elastic:
            board = Board(_endpoints(job) if job.endpoint else [])
            departure.replacements = Replacements(job.max_restarts, output, board)
            known = {LAUNCHER: board.address, **({JOIN: job.doors} if job.doors else {})}
        try:
            with output, _environment(known), departure.of_agents():
                elastic_launch(config, sys.executable)("-I", "-S", worker_start.__file__)
        except SignalException as error:
            return departure.status(error.sigval)
        except ChildFailedError as error:
            return _report(error, output)
        except (RendezvousError, DistError) as error:
            raise click.ClickException(
                f"The {config.max_nodes} hosts cannot reach each other at {config.rdzv_endpoint}: "
                f"{str(error).splitlines()[0]} Start the launcher on every host, and check "
                "--rdzv-endpoint and the firewall."
            ) from None
    return 0


def _are_all(tasks: Sequence[LocalTask]) -> bool:
    """Whether no task of the cluster, if there is one, runs on another host."""
    if not tasks:
        return True
    spec = tf_config_cluster(tasks[0].tf_config)
    return sum(map(spec.num_tasks, spec.jobs)) == len(tasks)


@contextmanager
def _ctrl_c_heard_while_waiting_for_hosts() -> Iterator[None]:
    """Lets Ctrl-C end the process while torch waits outside of Python.

    The agent takes the signal over as soon as there are workers to end.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _report(error: ChildFailedError, output: WorkerOutput) -> int:
    """Prints which worker failed first and how. Returns its exit status as in a shell."""
    rank, failure = error.get_first_failure()
    name = output.name(failure.local_rank, {"RANK": str(rank)})
    lines = output.last_lines(name, _LAST_LINES)
    how = in_words(failure.exitcode)
    print(f"{name} (process {failure.pid}) failed first, {how}.", file=sys.stderr)
    if lines:
        print("The last lines of its standard error:", *lines, sep="\n  ", file=sys.stderr)
    return 128 - failure.exitcode if failure.exitcode < 0 else int(failure.exitcode)


def _thread_limit(num_workers: int) -> dict[str, str]:
    """Divides the cores among the workers, unless the user has set a number of threads."""
    if num_workers == 1 or "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // num_workers, 1))}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables that the workers inherit."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
