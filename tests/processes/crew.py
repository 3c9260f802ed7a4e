"""Processes that live through many failures, each doing what the test tells it, again and again."""

from __future__ import annotations

import ctypes
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pytest
import torch
from torch._C._distributed_c10d import Store, TCPStore

from processes.forked import PROCESSES

_CLONE_NEWIPC = 0x08000000


class Desk(NamedTuple):
    """What a member uses: the store of its crew, and a way to speak before it returns."""

    store: Store
    tell: Callable[[Any], None]


class Member:
    """A process that calls functions, one after the other.

    Args:
        port: Where the store of its crew is.
        neighbor: The process that it shares a host with, if not this one.
    """

    def __init__(self, port: int, neighbor: int | None = None) -> None:
        self.pipe, theirs = PROCESSES.Pipe()
        arguments = (theirs, port, neighbor)
        self._process = PROCESSES.Process(target=work, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def process_id(self) -> int:
        number: int = self._process.pid
        return number

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        """Lets it call `function(desk, *args)`."""
        self.pipe.send((function, args))

    def hear(self, timeout: float) -> Any:
        """Returns what it tells next, or what its function returned."""
        if not self.pipe.poll(timeout):
            raise AssertionError(f"process {self.process_id} said nothing for {timeout:g} s")
        is_well, value = self.pipe.recv()
        assert is_well, value
        return value

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        os.kill(self.process_id, number)

    def wait_for_its_end(self, timeout: float) -> None:
        """Waits until it has been killed, or has killed itself."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"it has not ended within {timeout:g} s"

    def end(self) -> None:
        """Kills it, whatever it does."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self.pipe.close()


class Crew:
    """Members 0 to `size - 1`, shared out to hosts; one that is killed is replaced.

    Another host is a namespace for memory that processes share, on this machine. A process that
    takes no other part keeps it while members come and go.
    """

    def __init__(self, size: int, num_hosts: int = 1) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._keepers = [Member(self.store.port) for _ in range(1, num_hosts)]
        for keeper in self._keepers:
            keeper.begin(leave_host)
        refusals = [refusal for keeper in self._keepers if (refusal := keeper.hear(30))]
        if refusals:
            self.__exit__()
            pytest.skip(f"this kernel or user can make no namespaces: {refusals[0]}")
        neighbors = [None, *(keeper.process_id for keeper in self._keepers)]
        self._neighbors = [neighbors[rank * num_hosts // size] for rank in range(size)]
        self.members = [Member(self.store.port, neighbor) for neighbor in self._neighbors]
        see_to_work(self.members)

    def replace(self, rank: int, *, waits: bool = True) -> None:
        """Ends a member, and starts another in its place.

        Args:
            rank: Which one.
            waits: Whether to wait until the other has begun.
        """
        self.members[rank].end()
        self.members[rank] = Member(self.store.port, self._neighbors[rank])
        if waits:
            see_to_work([self.members[rank]])

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *error: object) -> None:
        for member in [*getattr(self, "members", ()), *self._keepers]:
            member.end()


def see_to_work(members: Sequence[Member]) -> None:
    """Waits for members to begin, so that the time they are given is not for that."""
    for member in members:
        member.begin(is_at_work)
    assert all(member.hear(60) for member in members)


def is_at_work(desk: Desk) -> bool:
    """What a member answers once it can."""
    return True


def leave_host(desk: Desk) -> str | None:
    """Leaves the memory that this process shares with others; returns why it cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    return os.strerror(ctypes.get_errno()) if libc.unshare(_CLONE_NEWIPC) else None


def work(pipe: Connection, port: int, neighbor: int | None) -> None:
    """Calls what comes through `pipe`, until that is closed."""
    # There are more members than cores.
    torch.set_num_threads(1)
    if neighbor is not None:
        _enter_host_of(neighbor)
    store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60), wait_for_workers=False)
    desk = Desk(store, lambda value: pipe.send((True, value)))
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            desk.tell(function(desk, *args))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _enter_host_of(process_id: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{process_id}/ns/ipc") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWIPC):
            raise OSError(ctypes.get_errno(), f"cannot enter the host of process {process_id}")
