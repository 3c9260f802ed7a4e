"""How tools run torch: in which processes, and with how many threads."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def quick_processes(*modules: str) -> Any:
    """Returns a multiprocessing context whose processes have imported `modules` already.

    They are forked from one that has. A process that has looked for GPUs cannot be forked, so on a
    machine with GPUs every process imports the modules itself.
    """
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(modules))
    return context


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
