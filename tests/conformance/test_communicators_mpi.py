"""The suite of all communicators over MPI, where there is an mpirun."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from processes.harness import run_ranks
from processes.mpi_crew import HAS_MPI, MPIRUN, WISHES
from processes.namespaces import enter, make_hosts
from processes.ports import free_port
from torch._C._distributed_c10d import Store, TCPStore

from unisono.communicators import connect
from unisono.kernels import native_core
from unisono.options import ReduceOp
from unisono_tools.namespaces import is_open_mpi, mpirun_between

PROGRAM = Path(__file__).parent / "mpi_program.py"
SECONDS = 150.0

pytestmark = [
    pytest.mark.skipif(not HAS_MPI, reason="needs mpirun and mpi4py"),
    pytest.mark.timeout(2 * SECONDS),
]


def run(
    name: str, folder: Path, command: list[str], address: str = "127.0.0.1"
) -> tuple[dict[int, str], str]:
    """Returns what the ranks of a program told, and what they wrote to the standard error."""
    arguments = [name, address, str(free_port()), str(folder)]
    ended = subprocess.run(
        [*command, sys.executable, str(PROGRAM), *arguments],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=os.environ | WISHES,
    )
    told = {int(path.name): path.read_text() for path in folder.iterdir() if path.name.isdigit()}
    return told, ended.stderr


def test_every_collective_has_the_bits_of_the_tree_and_a_late_rank_is_named(tmp_path: Path) -> None:
    told, errors = run("cases", tmp_path, [str(MPIRUN), "-n", "3"])

    assert told == dict.fromkeys(range(3), "failed [], then WorkerTimeoutError (1,)"), errors


def test_a_rank_that_never_ends_does_not_keep_the_job_alive(tmp_path: Path) -> None:
    start = time.monotonic()

    told, errors = run("stuck", tmp_path, [str(MPIRUN), "-n", "3"])

    assert told == dict.fromkeys((0, 2), "WorkerTimeoutError (1,)"), errors
    assert time.monotonic() - start < SECONDS


def test_a_dead_rank_is_named_where_mpi_lets_the_others_live(tmp_path: Path) -> None:
    if not is_open_mpi([str(MPIRUN)]):
        pytest.skip("this MPI ends all processes when one of them dies")

    told, errors = run("killed", tmp_path, [str(MPIRUN), "--with-ft", "ulfm", "-n", "3"])

    assert told == dict.fromkeys((0, 2), "WorkerLostError (1,)"), errors


def test_mpi_is_chosen_between_hosts(tmp_path: Path) -> None:
    with make_hosts(2) as hosts:
        command = mpirun_between(hosts, [str(MPIRUN)], 4, tmp_path)
        told, errors = run("chosen", tmp_path, command, hosts.address(0))

    inside = "shared memory inside 2 hosts, MPI between them"
    name = "MPI" if native_core().kernel is None else inside
    assert told == dict.fromkeys(range(4), f"{name}, failed []"), errors


def test_large_tensors_arrive_while_ranks_wait_for_others_of_their_host(tmp_path: Path) -> None:
    with make_hosts(2) as hosts:
        command = mpirun_between(hosts, [str(MPIRUN)], 4, tmp_path)
        told, errors = run("large", tmp_path, command, hosts.address(0))

    assert told == dict.fromkeys(range(4), "done"), errors


def connect_without_mpirun(_: Store, rank: int, size: int, names: list[str]) -> str:
    """The launcher has left its variables, and its MPI is not the one that mpi4py has."""
    os.environ["OMPI_COMM_WORLD_SIZE"] = str(size)
    enter(names[rank])
    limit = timedelta(seconds=60)
    store = TCPStore("10.83.0.1", 29400, None, rank == 0, limit, wait_for_workers=False)
    with connect(store, rank, size, timeout_seconds=60) as communicator:
        total = torch.ones(2)
        communicator.all_reduce(ReduceOp.SUM, [total])
        assert total.tolist() == [2.0, 2.0]
        communicator.barrier()
        if rank == 0:
            # The coordinator ends last.
            time.sleep(0.5)
        return communicator.name


def test_ranks_that_are_no_world_of_mpi_use_gloo() -> None:
    with make_hosts(2) as hosts:
        assert run_ranks(2, connect_without_mpirun, hosts.names) == ["Gloo", "Gloo"]
