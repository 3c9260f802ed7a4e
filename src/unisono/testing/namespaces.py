"""Hosts as network namespaces, with a cable each to a switch, that can be slow or cut."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from unisono.errors import UnsupportedError

_CLONE_NEWNET = 0x40000000


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
