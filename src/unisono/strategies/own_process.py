"""A strategy belongs to the process that made it, also after a fork."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from unisono.errors import ContextError

if TYPE_CHECKING:
    from unisono.functions import Captures
    from unisono.gradients import GradientReducer
    from unisono.reductions import CrossDeviceOps, Workers
    from unisono.strategies.runner import Runner
    from unisono.strategies.strategy import Strategy
    from unisono.variables import Mirrors


class OwnProcess:
    """The part of an extension that is about the process it is in."""

    if TYPE_CHECKING:
        cross_device_ops: CrossDeviceOps
        mirrors: Mirrors
        workers: Workers
        gradients: GradientReducer
        _run_lock: AbstractContextManager[Any]
        _captures: Captures
        _runner: Runner

        @property
        def strategy(self) -> Strategy:
            """See `StrategyExtended.strategy`."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def check_process(self) -> None:
        """In a forked child: lets new threads start, or refuses to speak for this worker.

        Raises:
            ContextError: If there are other workers, which know the parent only.
        """
        if self._process == os.getpid():
            return
        if self.workers.are_many:
            raise ContextError(
                f"{self.strategy!r} was made by process {self._process}, but this is process "
                f"{os.getpid()}, which was forked from it. A forked process is not a worker of the "
                "cluster. Use the strategy in the process that made it, or start processes with "
                "`spawn`."
            )
        self._process = os.getpid()
        self.mirrors.fronts.take_down_in_child()
        self._runner = self._runner.restarted()
        if not self.mirrors.is_single:
            # A thread of the parent may have held it.
            self._run_lock = threading.Lock()

    def close(self) -> None:
        """Ends the threads of the replicas, and leaves the other workers."""
        if self._process != os.getpid() and self.workers.are_many:
            return
        # First, because it ends what the threads may wait for.
        self.workers.communicator.close()
        self.gradients.close()
        self._captures.close()
        self._runner.close()
        self.cross_device_ops.close()
