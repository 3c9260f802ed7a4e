"""`CheckpointManager`: numbered checkpoints in a folder, of which the newest are kept."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from unisono.arguments import check_bool, check_instance, check_int
from unisono.checkpoints.checkpoint import (
    UNFINISHED,
    Checkpoint,
    save_together,
    together,
    write_file,
)
from unisono.errors import UnsupportedError
from unisono.input import copied
from unisono.reductions import Workers
from unisono.workers.joining import jobs

_log = logging.getLogger("unisono")


class CheckpointManager:
    """Saves a checkpoint under a new number each time, and deletes the oldest ones.

    All workers make it and call its methods. The chief writes, so the folder must be one that all
    workers can read. A file appears under its name when it is complete: after a kill at any time,
    the newest file is a whole checkpoint.

    Args:
        checkpoint: What to save.
        directory: The folder; it is made if it is not there.
        max_to_keep: How many checkpoints to keep; None keeps all.
        checkpoint_name: How the names of the files begin.

    Attributes:
        longest_seconds: How long the slowest save of this process took; 0 if there was none.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        *,
        checkpoint_name: str = "ckpt",
    ) -> None:
        check_instance("checkpoint", checkpoint, Checkpoint, "an `experimental.Checkpoint`")
        if max_to_keep is not None:
            check_int("max_to_keep", max_to_keep, least=1)
        if not checkpoint_name or Path(checkpoint_name).name != checkpoint_name:
            raise UnsupportedError(
                f"`checkpoint_name` must be the name of a file, got {checkpoint_name!r}. Give the "
                "folder as `directory`."
            )
        self._checkpoint = checkpoint
        self._folder = Path(directory)
        self._max_to_keep = max_to_keep
        self._name = checkpoint_name
        self._pending: tuple[ThreadPoolExecutor, Future[None]] | None = None
        self.longest_seconds = 0.0

    @property
    def checkpoint(self) -> Checkpoint:
        """What is saved."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """The folder."""
        return str(self._folder)

    @property
    def checkpoints(self) -> list[str]:
        """The files of all checkpoints in the folder, the newest last."""
        return [str(path) for _, path in self._found()]

    @property
    def latest_checkpoint(self) -> str | None:
        """The file of the newest checkpoint; None if there is none."""
        found = self._found()
        return str(found[-1][1]) if found else None

    def save(self, checkpoint_number: int | None = None, *, background: bool = False) -> str:
        """Saves a checkpoint. All workers call it.

        Args:
            checkpoint_number: The number in the name of the file; the next one if None.
            background: Whether to copy the state to host memory and return, while a thread writes
                the copy. If that fails, the next call of `save` or `wait` raises the error.

        Returns:
            The name of the file.

        Raises:
            Exception: As `Checkpoint.save` does.
        """
        check_bool("background", background)
        if checkpoint_number is not None:
            check_int("checkpoint_number", checkpoint_number, least=0)
        self.wait()
        start, number = time.monotonic(), checkpoint_number

        def prepare(workers: Workers) -> Callable[[], None]:
            nonlocal number
            state = self._checkpoint.state(workers)
            if number is None:
                # The chief's folder counts.
                found = self._found()
                number = found[-1][0] + 1 if found else 1
            number = workers.gather_objects(number)[0]
            return lambda: self._save(state, self._path(number), start, background=background)

        save_together(prepare, f"save a checkpoint in {self._folder}")
        return str(self._path(number))

    def wait(self) -> None:
        """Waits for the save in the background. All workers call it.

        Raises:
            CommunicationError: If the chief could not write the file. The chief raises the error
                itself.
        """
        save_together(lambda _: self._finish, "save in the background")

    def restore_or_initialize(self) -> str | None:
        """Restores the newest checkpoint, if there is one. All workers call it.

        Returns:
            The file that was restored; None if there was none, or if this worker has joined an
            elastic job, whose other workers give it their state.

        Raises:
            UnsupportedError: If this worker does not see the file that the chief has found, or the
                file does not fit; see `Checkpoint.restore`.
        """
        if (job := jobs.newest()) is not None and job.is_arriving:
            return None
        self.wait()
        found = self._found()
        newest = found[-1][0] if found else None
        number = together(lambda workers: workers.gather_objects(newest)[0])
        if number is None:
            return None
        path = self._path(number)
        if not path.exists():
            raise UnsupportedError(
                f"The chief has found {path}, but this worker does not see that file. Use a folder "
                "that all workers can read."
            )
        self._checkpoint.restore(path)
        return str(path)

    def _save(self, state: Any, path: Path, start: float, *, background: bool) -> None:
        # There is one if a worker was lost during this save.
        self._finish()
        if not background:
            self._write(state, path, start)
            return
        # Python waits for the thread at exit.
        writer = ThreadPoolExecutor(1, thread_name_prefix="unisono checkpoint")
        # A copy, which the training does not change.
        written = writer.submit(self._write, copied(state, to="cpu"), path, start)
        self._pending = writer, written
        writer.shutdown(wait=False)

    def _finish(self) -> None:
        """Waits for the save in the background, if there is one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            writer, written = pending
            # Its thread has ended, too, when this returns.
            writer.shutdown()
            written.result()

    def _path(self, number: int | None) -> Path:
        return self._folder / f"{self._name}-{number}.pt"

    def _found(self) -> list[tuple[int, Path]]:
        files = self._files(rf"{re.escape(self._name)}-(\d+)\.pt")
        return sorted((int(fits[1]), path) for fits, path in files)

    def _files(self, pattern: str) -> list[tuple[re.Match[str], Path]]:
        # Other managers may save to this folder, too.
        paths = self._folder.iterdir() if self._folder.is_dir() else ()
        return [(fits, path) for path in paths if (fits := re.fullmatch(pattern, path.name))]

    def _write(self, state: Any, path: Path, start: float) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Of processes that were killed, or paused for so long that this one took over.
            own = rf"\.{re.escape(self._name)}-\d+\.pt\.\w+{re.escape(UNFINISHED)}"
            unfinished = [path for _, path in self._files(own)]
            write_file(state, path)
            old = [] if self._max_to_keep is None else self._found()[: -self._max_to_keep]
            for one in (*unfinished, *(file for _, file in old if file != path)):
                one.unlink(missing_ok=True)
        except Exception as error:
            _log.error("Cannot save %s: %s: %s", path, type(error).__name__, error)
            raise
        seconds = time.monotonic() - start
        self.longest_seconds = max(self.longest_seconds, seconds)
        _log.info("Saved %s in %.1f s.", path, seconds)
