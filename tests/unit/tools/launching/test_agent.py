"""The agent that starts the workers of a host, and ends them."""

from __future__ import annotations

import signal

import pytest
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.multiprocessing import SignalException

from unisono_tools.launching.agent import Departure


def test_a_second_sigterm_is_not_heard_from_the_moment_of_the_first() -> None:
    before = signal.getsignal(signal.SIGTERM)
    torchs = vars(multiprocessing.api)["_terminate_process_handler"]
    try:
        with Departure(1.0).of_agents():
            # As torch does when it starts the workers.
            signal.signal(signal.SIGTERM, vars(multiprocessing.api)["_terminate_process_handler"])
            with pytest.raises(SignalException):
                signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert vars(multiprocessing.api)["_terminate_process_handler"] is torchs
