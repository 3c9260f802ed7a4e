"""Workers of an elastic job that fail, and are started again one by one while the others go on."""

from __future__ import annotations

import sys
import time
from inspect import signature
from typing import Any

from torch.distributed.elastic.multiprocessing import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from unisono.cluster.elastic.finding import REPLACEMENT
from unisono_tools.launching.board import Board
from unisono_tools.launching.worker_output import WorkerOutput, in_words

_PAUSE_SECONDS = 0.1


class Replacements:
    """Looks after the workers of this host until all of them have ended.

    Args:
        max_restarts: How often a worker is started again, all of them counted together.
        output: Where their output goes.
        board: Where they say where the workers of the job are.
    """

    def __init__(self, max_restarts: int, output: WorkerOutput, board: Board) -> None:
        self._max_restarts = max_restarts
        self._num_restarts = 0
        # The ranks that were started again, and those whose failure does not matter.
        self._again: set[int] = set()
        self._tolerated: set[int] = set()
        self._output = output
        self._board = board

    def look_after(self, workers: SubprocessContext, group: Any) -> None:
        """Returns when no worker runs any more.

        The workers that have failed then count as failed only if none has succeeded: a worker that
        is lost on the way does not matter to a job that others have finished.

        Args:
            workers: The processes of this host.
            group: How torch's agent knows them.
        """
        self._board.begin()
        while True:
            statuses = {rank: one.proc.poll() for rank, one in workers.subprocess_handlers.items()}
            running = {rank for rank, status in statuses.items() if status is None}
            failed = {rank for rank, status in statuses.items() if status}
            for rank in failed - self._tolerated:
                if not self._restarted(workers, group, rank):
                    self._tolerated.add(rank)
            if not running and failed <= self._tolerated:
                break
            if 0 in statuses.values() and running and running <= self._again - self._tolerated:
                self._end_if_late(workers, running)
            time.sleep(_PAUSE_SECONDS)
        if 0 in statuses.values():
            workers._running_local_ranks -= self._tolerated

    def _end_if_late(self, workers: SubprocessContext, running: set[int]) -> None:
        """Ends workers that were started again, if the others have finished without them."""
        numbers = [workers.envs[rank][REPLACEMENT] for rank in running]
        if self._board.have_joined(numbers) or self._board.has_running_workers():
            return
        for rank in running:
            process = workers.subprocess_handlers[rank].proc
            name = self._output.name(rank, workers.envs[rank])
            late = f"{name} (process {process.pid}) comes too late: the others have finished."
            print(late, file=sys.stderr)
            process.terminate()
        self._tolerated |= running

    def _restarted(self, workers: SubprocessContext, group: Any, rank: int) -> bool:
        process = workers.subprocess_handlers[rank].proc
        name = self._output.name(rank, workers.envs[rank])
        told = f"{name} (process {process.pid}) ended {in_words(process.returncode)}"
        left = self._max_restarts - self._num_restarts
        if left == 0:
            print(f"{told}. It is not started again; the others go on.", file=sys.stderr)
            return False
        self._num_restarts += 1
        self._again.add(rank)
        workers.envs[rank][REPLACEMENT] = str(self._num_restarts)
        print(f"{told} and is started again; restarts left: {left - 1}.", file=sys.stderr)
        files = workers.stdouts, workers.stderrs
        for paths in files:
            paths[rank] = f"{paths[rank]}.{self._num_restarts}"
        self._output.follow(rank, workers.envs[rank], *(paths[rank] for paths in files))
        start: Any = SubprocessHandler
        # The cores are left to the system. Only newer versions of torch know another way.
        has_cores = "numa_options" in signature(SubprocessHandler).parameters
        workers.subprocess_handlers[rank] = start(
            workers.entrypoint,
            workers.args[rank],
            workers.envs[rank],
            workers.stdouts[rank],
            workers.stderrs[rank],
            rank,
            **({"numa_options": None} if has_cores else {}),
        )
        # The agent makes sure that its workers are these processes.
        group.workers[rank].id = workers.subprocess_handlers[rank].proc.pid
        return True
