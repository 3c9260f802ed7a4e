"""The processes of data loaders, which torch lists for the interpreter lock to protect."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

from torch.utils.data._utils import signal_handling as _signal_handling

from unisono.sharing import computed_once

_lock: Any = threading.RLock()
signal_handling: Any = _signal_handling


@computed_once
def guard_list_of_processes() -> None:
    """Lets one thread at a time use torch's list of the processes of all data loaders.

    The main thread reads it when a process ends, in the handler of a signal. A thread that draws
    ahead adds processes to it, and removes them. At the same time, both would end in a crash.
    """
    vars(signal_handling).update(
        _error_if_any_worker_fails=_locked(signal_handling._error_if_any_worker_fails),
        _remove_worker_pids=_locked(signal_handling._remove_worker_pids),
        _set_worker_pids=_locked(signal_handling._set_worker_pids),
    )
    # Another thread may hold it when a process is forked.
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)


def _locked(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def locked(*args: Any) -> Any:
        # The thread that holds it may get the signal.
        with _lock:
            return call(*args)

    return locked
