"""torch's elastic agent, with a grace period for workers and their exit statuses."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SubprocessContext
from torch.distributed.elastic.multiprocessing.api import _terminate_process_handler
from torch.distributed.launcher import api

from unisono_tools.launching.replacements import Replacements


class Departure:
    """Ends the workers of this host, and records how they ended.

    Args:
        grace_seconds: How long they may take before they are killed.

    Attributes:
        replacements: Starts single workers again; None if all of them start again together.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.replacements: Replacements | None = None
        self._grace_seconds = grace_seconds
        self._statuses: set[int] = set()

    def status(self, sent: signal.Signals) -> int:
        """Returns the exit status of a launcher that was sent a signal.

        If all workers have left with one status, as after saving, it is that status.
        """
        (status,) = self._statuses if len(self._statuses) == 1 else (-1,)
        return status if status >= 0 else 128 + int(sent)

    def end(self, workers: Any, sent: signal.Signals) -> None:
        """Sends the workers a signal, waits for them, and kills those that do not leave."""
        workers.close(sent, self._grace_seconds)
        if isinstance(workers, SubprocessContext):
            processes = [one.proc for one in workers.subprocess_handlers.values()]
            statuses = (process.poll() for process in processes)
            self._statuses = {-1 if status is None else status for status in statuses}

    @contextmanager
    def of_agents(self) -> Iterator[None]:
        """Within the block, the agents of `elastic_launch` end their workers in this way."""
        departure = self

        class Agent(LocalElasticAgent):
            def _monitor_workers(self, worker_group: Any) -> Any:
                workers, replacements = self._pcontext, departure.replacements
                if replacements is not None and isinstance(workers, SubprocessContext):
                    replacements.look_after(workers, worker_group)
                return super()._monitor_workers(worker_group)

            def _exit_barrier(self) -> None:
                # In an elastic job, the launcher of another host may be lost.
                if departure.replacements is None:
                    super()._exit_barrier()  # type: ignore[no-untyped-call]

            def _shutdown(
                self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any
            ) -> None:
                if self._pcontext is not None:
                    departure.end(self._pcontext, death_sig)
                super()._shutdown(death_sig, *args, **kwargs)

        def leave(number: int, frame: FrameType | None) -> None:
            # At once: a second SIGTERM must not end the launcher, and with it workers that save.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _terminate_process_handler(number, frame)

        # torch uses the class and the handler that it finds under these names.
        vars(api)["LocalElasticAgent"] = Agent
        vars(multiprocessing.api)["_terminate_process_handler"] = leave
        try:
            yield
        finally:
            vars(api)["LocalElasticAgent"] = LocalElasticAgent
            vars(multiprocessing.api)["_terminate_process_handler"] = _terminate_process_handler
