"""Lets MPI go on with what was sent while nobody calls it.

MPI may say that a message is sent when it has only put it into a queue, and it works on the queue
only while it is called. A rank that computes, or waits for others of its host, does not call it.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

# How soon the thread looks again after a call of the program, and how rarely after a long time.
_LEAST_SECONDS = 5e-3
_MOST_SECONDS = 0.1


class Progress:
    """A thread that calls MPI if the program does not; started by the first message.

    Args:
        call: Calls MPI, which returns at once.

    Attributes:
        num_calls: How often the program has called MPI. It counts by itself.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self.num_calls = 0
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread, if it does not run."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="unisono MPI", daemon=True)
                self._thread.start()
                # MPI ends after this, and must not be called then.
                atexit.register(self._stop)

    def _run(self) -> None:
        seconds, num_seen = _LEAST_SECONDS, -1
        while not self._end.wait(seconds):
            if self.num_calls != num_seen:
                seconds, num_seen = _LEAST_SECONDS, self.num_calls
            else:
                self._call()
                seconds = min(2 * seconds, _MOST_SECONDS)

    def _stop(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
