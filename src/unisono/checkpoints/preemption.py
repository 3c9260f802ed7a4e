"""`PreemptionCheckpointHandler`: saves and leaves before the platform ends the workers."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from unisono.arguments import check_callable, check_instance, check_optional
from unisono.checkpoints.agreement import Agreement, ElasticAgreement, Notice, TerminationConfig
from unisono.checkpoints.checkpoint import Checkpoint
from unisono.checkpoints.manager import CheckpointManager
from unisono.cluster import ClusterResolver, Membership
from unisono.communicators import JobStore, TracedCommunicator
from unisono.errors import ClusterError, UnsupportedError
from unisono.workers.joining import jobs, newest_workers

T = TypeVar("T")
_log = logging.getLogger("unisono")


class PreemptionCheckpointHandler:
    """Saves and leaves when a worker is about to be ended, and resumes when it is started again.

    Making it restores the newest checkpoint, if there is one. When a worker gets SIGTERM, or what
    else the `TerminationConfig` names, all workers finish the same step. The chief saves, and all
    leave with exit status 0:

        checkpoint = uo.experimental.Checkpoint(model=model, optimizer=optimizer, input=batches)
        handler = uo.experimental.PreemptionCheckpointHandler(
            strategy.cluster_resolver, checkpoint, "checkpoints"
        )
        while handler.total_run_calls < num_steps:
            for batch in batches:
                loss = handler.run(train_step, batch)

    In an elastic job, a worker that is preempted leaves without saving, and the others go on with
    its replicas. Only if fewer than `min_workers` would be left do all workers save and leave. The
    handler also lets workers join, as `MultiWorkerMirroredStrategy.experimental_admit` does. On a
    worker that joins, making it takes over the state of the others, and reads no file.

    Make it on all workers, after the strategy, in the main thread. If you make a new strategy, make
    a new handler.

    Args:
        cluster_resolver: `strategy.cluster_resolver`, which is None for a strategy of one worker.
        checkpoint_or_checkpoint_manager: What to save: a `Checkpoint`, or a `CheckpointManager`
            that the program also uses for its own saves.
        checkpoint_dir: The folder for a `Checkpoint`, of which the newest file is kept. All workers
            must be able to read it.
        termination_config: What announces the end, and how to leave.

    Raises:
        UnsupportedError: If an argument is wrong, or the checkpoint in the folder does not fit.
        ClusterError: If `cluster_resolver` does not describe the workers of this process.
        ContextError: If it is made outside the main thread, and no function announces the end.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        check_optional(
            "termination_config", termination_config, TerminationConfig, "a `TerminationConfig`"
        )
        self._manager = _manager(checkpoint_or_checkpoint_manager, checkpoint_dir)
        job = jobs.newest()
        wanted = "one of `unisono.cluster_resolver`"
        check_optional("cluster_resolver", cluster_resolver, ClusterResolver, wanted)
        joined = _workers_of(cluster_resolver) if job is None else None
        self._config = termination_config or TerminationConfig()
        self._notice = Notice(self._config)
        try:
            # All workers take part, so all of them watch their signals when the first one goes on.
            self._manager.restore_or_initialize()
            if job is not None:
                job.admit(self._manager.checkpoint)
        except BaseException:
            self._notice.close()
            raise
        self._agreement = (
            Agreement(self._notice, joined) if job is None else ElasticAgreement(self._notice, job)
        )
        # Also when the program ends.
        self._end = weakref.finalize(self, self._agreement.close)

    @property
    def total_run_calls(self) -> int:
        """How many steps have been run, those before a restart included."""
        return self._manager.checkpoint.total_run_calls

    def run(self, distributed_train_function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs one step. All workers call it the same number of times.

        If a worker is about to be ended, the call saves after the step and leaves the program, in
        an elastic job as described above. What
        the function does is in the checkpoint, and what the program does after this call is not. So
        let the function do everything that belongs to the step, such as `scheduler.step()`.

        Args:
            distributed_train_function: The step, which calls `strategy.run`.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            What the function returns.

        Raises:
            UnsupportedError: If the function cannot be called, or the checkpoint not be saved.
            CommunicationError: If another worker is lost.
        """
        check_callable("distributed_train_function", distributed_train_function)
        with self.watch_preemption_scope():
            return distributed_train_function(*args, **kwargs)

    @contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Makes the block one step, as `run` does with a function."""
        self._agreement.begin()
        start = time.monotonic()
        try:
            yield
        except BaseException:
            self._agreement.fail()
            raise
        self._notice.step_seconds = max(self._notice.step_seconds, time.monotonic() - start)
        self._finish()

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Saves and leaves if a worker is about to be ended. All workers call it after each step.

        For programs that do not use `run`. Each call counts as a step.

        Args:
            *args: Arguments for `TerminationConfig.save_fn`, or `CheckpointManager.save`.
            **kwargs: Keyword arguments for it.

        Raises:
            UnsupportedError: If the checkpoint cannot be saved.
            CommunicationError: If another worker is lost.
        """
        self._agreement.begin()
        self._finish(*args, **kwargs)

    def close(self) -> None:
        """Stops watching, and gives the signals back to the handlers that they had before."""
        self._end()
        self._notice.close()

    def __del__(self) -> None:
        # A second SIGTERM must not end a program that is about to leave with status 0.
        if (notice := getattr(self, "_notice", None)) is not None and not notice.is_leaving:
            notice.close()

    def _finish(self, *args: Any, **kwargs: Any) -> None:
        self._manager.checkpoint.total_run_calls += 1
        self._notice.save_seconds = self._manager.longest_seconds
        if not self._agreement.end():
            return
        _log.warning("Saving and leaving after step %d: preempted.", self.total_run_calls)
        (self._config.save_fn or self._manager.save)(*args, **kwargs)
        self._end()
        self._notice.leave()


def _manager(given: Checkpoint | CheckpointManager, folder: Any) -> CheckpointManager:
    check_instance(
        "checkpoint_or_checkpoint_manager",
        given,
        (Checkpoint, CheckpointManager),
        "an `experimental.Checkpoint` or an `experimental.CheckpointManager`",
    )
    if isinstance(given, CheckpointManager):
        if folder is not None:
            raise UnsupportedError(
                f"The `CheckpointManager` saves in {given.directory}, but `checkpoint_dir` is "
                f"{folder!r}. Leave out `checkpoint_dir`, or give a `Checkpoint`."
            )
        return given
    if folder is None:
        raise UnsupportedError("A `Checkpoint` needs a folder: give `checkpoint_dir`.")
    return CheckpointManager(given, folder, max_to_keep=1)


def _workers_of(resolver: ClusterResolver | None) -> tuple[TracedCommunicator, JobStore] | None:
    """Returns what connects the workers of this process, which must be those of the resolver."""
    joined = newest_workers()
    if resolver is None:
        return joined
    named = Membership.of(resolver)
    rank, size = (0, 1) if joined is None else (joined[0].rank, joined[0].size)
    if (named.rank, named.size) != (rank, size):
        raise ClusterError(
            f"`cluster_resolver` describes worker {named.rank} of {named.size}, but this process "
            f"is worker {rank} of {size}. Make the strategy first, and give its "
            "`strategy.cluster_resolver`."
        )
    return joined
