"""Traces of programs that use the backend: DDP, FSDP, tensor parallelism."""

from __future__ import annotations

import secrets

import torch
from torch import distributed

from unisono.communicators import Communicator, TracedCommunicator
from unisono.tracing import join_workers


def traced(communicator: Communicator) -> Communicator:
    """Returns a communicator whose collectives are recorded. Every rank of a group calls it.

    The first group of a process, torch's default one, tells which worker the process is.
    """
    if not distributed.is_initialized():
        join_workers(communicator.rank, communicator.size)
    # Traces of the ranks are matched by it, so no other group of the job may have the same.
    number = torch.tensor(secrets.randbits(48))
    try:
        communicator.broadcast(number)
    except BaseException:
        communicator.close()
        raise
    return TracedCommunicator(communicator, group=int(number))
