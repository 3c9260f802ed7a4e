"""How tools run torch: in which processes, at which ports, and with how many threads."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from multiprocessing import forkserver
from typing import Any

import torch


def quick_processes(*modules: str) -> Any:
    """Returns a multiprocessing context whose processes have imported `modules` already.

    They are forked from one that has, which ends with this process. A process that has looked for
    GPUs cannot be forked, so on a machine with GPUs every process imports the modules itself.
    """
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # What it freezes is what was imported before.
    context.set_forkserver_preload([*modules, "unisono_tools.frozen"])
    _end_fork_server_at_exit()
    return context


@cache
def _end_fork_server_at_exit() -> None:
    """By itself it would go on: it imports all modules first, and then takes a second to end."""
    atexit.register(_end_fork_server, os.getpid())


def _end_fork_server(owner: int) -> None:
    server: Any = forkserver._forkserver
    # What this process has forked must leave it alone.
    if owner == os.getpid() and server._forkserver_pid is not None:
        with suppress(OSError):
            os.kill(server._forkserver_pid, signal.SIGKILL)
            server._stop()


def free_ports(count: int) -> list[int]:
    """Returns different free ports of this host."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextmanager
def one_thread() -> Iterator[None]:
    """Keeps torch from sharing out its work: a CPU replica is one core.

    Threads of torch spin while they wait for each other, which takes ten times as long as soon as
    another program wants a core, too.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
