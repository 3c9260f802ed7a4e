"""Hosts as network namespaces, each with a cable to a switch that can be slow or cut.

Benchmarks and tests run workers and MPI jobs on them.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from unisono.errors import UnsupportedError

_CLONE_NEWNET = 0x40000000
# Takes the place of ssh: goes to the namespace of a host, and gives the host its own name.
_AGENT = """#!/bin/bash
while [[ "$1" == -* ]]; do shift; done
number=$(( ${{1##*.}} - 1 )); shift
exec ip netns exec {prefix}$number unshare --uts bash -c "hostname host$number; $*"
"""
# Open MPI refuses otherwise to start for root, and would not let other processes have the core.
_WISHES = [
    "OMPI_ALLOW_RUN_AS_ROOT=1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    "OMPI_MCA_mpi_yield_when_idle=1",
]


class Hosts:
    """Network namespaces 10.83.0.1, 10.83.0.2, ... Made by `make_hosts`."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"10.83.0.{host + 1}"

    def slow_down(self, rate: str) -> None:
        """Limits what every host sends, for example to "1gbit" a second."""
        for name in self.names:
            limit = ["tbf", "rate", rate, "burst", "128kb", "latency", "50ms"]
            run("tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", *limit)

    def cut(self, host: int) -> None:
        """Pulls the cable of a host."""
        run("ip", "-n", self.names[host], "link", "set", "eth0", "down")

    def mute(self, host: int) -> None:
        """Drops all that a host sends. It gets what others send, and they notice no cut."""
        nothing = ["tbf", "rate", "8bit", "burst", "1", "latency", "1ms"]
        run("tc", "-n", self.names[host], "qdisc", "replace", "dev", "eth0", "root", *nothing)

    def reconnect(self, host: int) -> None:
        """Plugs the cable of a host in again, and sends what it sends."""
        run("tc", "-n", self.names[host], "qdisc", "replace", "dev", "eth0", "root", "pfifo")
        run("ip", "-n", self.names[host], "link", "set", "eth0", "up")


@contextmanager
def make_hosts(count: int) -> Iterator[Hosts]:
    """Makes hosts, which are gone at the end.

    Raises:
        UnsupportedError: if the kernel refuses, or the user may not.
    """
    names = [f"unisono{os.getpid()}h{number}" for number in range(count)]
    switch = f"unisono{os.getpid()}s"
    with ExitStack() as stack:
        try:
            for name in [switch, *names]:
                run("ip", "netns", "add", name)
                stack.callback(run, "ip", "netns", "delete", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
            run("ip", "-n", switch, "link", "set", "bridge", "up")
            hosts = Hosts(names)
            for number in range(count):
                _plug_in(hosts, number, switch)
        except (OSError, subprocess.CalledProcessError) as error:
            told = getattr(error, "stderr", None) or str(error)
            raise UnsupportedError(
                f"Cannot make {count} network namespaces: {told.strip()} Run as root, on Linux "
                "with iproute2."
            ) from error
        yield hosts


def _plug_in(hosts: Hosts, number: int, switch: str) -> None:
    name, port = hosts.names[number], f"port{number}"
    run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", port, "netns", switch)
    run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    run("ip", "-n", name, "address", "add", f"{hosts.address(number)}/24", "dev", "eth0")
    run("ip", "-n", name, "link", "set", "eth0", "up")


def run(*command: str) -> None:
    """Runs a command that must succeed."""
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)


def enter(name: str) -> None:
    """Moves this thread, and those that it will start, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    set_namespace: Callable[[int, int], int] = libc.setns
    with open(f"/run/netns/{name}") as namespace:
        if set_namespace(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")


def mpirun_between(hosts: Hosts, mpirun: Sequence[str], num_ranks: int, folder: Path) -> list[str]:
    """Returns the command that starts processes on hosts, to which the program is to be added.

    Args:
        hosts: Where the processes run, in equal numbers.
        mpirun: The launcher of Open MPI or MPICH, perhaps with options.
        num_ranks: How many processes there are.
        folder: Where a script may be written, which must stay until the processes have started.
    """
    agent = folder / "agent"
    agent.write_text(_AGENT.format(prefix=hosts.names[0].removesuffix("0")))
    agent.chmod(0o700)
    per_host = num_ranks // len(hosts.names)
    places = ",".join(f"{hosts.address(i)}:{per_host}" for i in range(len(hosts.names)))
    if is_open_mpi(mpirun):
        options = ["--prtemca", "plm_ssh_agent", str(agent)]
        options += ["--prtemca", "plm_ssh_no_tree_spawn", "1", "--host", places]
        options += ["--map-by", f"ppr:{per_host}:node:oversubscribe", "--bind-to", "none"]
    else:
        options = ["-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", places]
    inside = ["ip", "netns", "exec", hosts.names[0], "unshare", "--uts", "env", *_WISHES]
    named = ["bash", "-c", 'hostname host0; exec "$@"', "mpirun"]
    return [*inside, *named, *mpirun, *options, "-n", str(num_ranks)]


def is_open_mpi(mpirun: Sequence[str]) -> bool:
    """Returns whether a launcher is that of Open MPI, whose options differ from MPICH's."""
    told = subprocess.run(
        [*mpirun, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    return "Open MPI" in told.stdout + told.stderr
