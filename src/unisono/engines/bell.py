"""What the threads of replicas wait for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeAlias

from unisono.kernels import native_core
from unisono.system import process_cores

if TYPE_CHECKING:
    from unisono import _native

Bell: TypeAlias = "PythonBell | _native.Bell"

# About 200 us. To wake a thread that sleeps takes 25 us or more, and most waits are shorter.
_LOOKS = 5000


class PythonBell:
    """A bell that counts how often it has rung, where there is no native core."""

    def __init__(self) -> None:
        self.count = 0
        # Taken directly, as a `Condition` is not taken in one instruction.
        self._lock = threading.Lock()
        self._rung = threading.Condition(self._lock)

    def ring(self) -> None:
        """Wakes all who wait."""
        with self._lock:
            self.count += 1
            self._rung.notify_all()

    def wait(self, seen: int, timeout_s: float) -> bool:
        """Waits until it has rung more often than `seen`; False if it has not in time."""
        with self._lock:
            return self._rung.wait_for(lambda: self.count > seen, timeout_s)


def make_bell(num_threads: int) -> Bell:
    """Makes a bell; who waits looks for a while before it sleeps if each thread has a core."""
    make = native_core().bell
    if make is None:
        return PythonBell()
    return make(_LOOKS if num_threads <= len(process_cores()) else 0)
