"""`Checkpoint`: the objects that make up the state of a training, in one file."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from torch import Tensor

from unisono.arguments import in_words
from unisono.communicators.wire import read, write
from unisono.errors import CommunicationError, UnsupportedError
from unisono.input.source.random_state import random_state, set_random_state
from unisono.reductions import Workers
from unisono.values import flatten
from unisono.variables import Variable
from unisono.workers.connected import ConnectedWorkers
from unisono.workers.hooking import hooks
from unisono.workers.joining import jobs, newest_workers

T = TypeVar("T")

# How the names of files end that are being written.
UNFINISHED = ".unfinished"
_KEYS = {"objects", "random", "total_run_calls"}
_log = logging.getLogger("unisono")


class Checkpoint:
    """Objects that are saved and restored together.

    A checkpoint also holds the states of the random generators of torch, Python and NumPy, what a
    communication hook keeps, and the number of steps that a `PreemptionCheckpointHandler` has run.
    A training that is restored from
    it in the middle of an epoch ends with the same bits, also with another number of workers, as
    long as the number of replicas is the same.

    Args:
        **objects: What to save, by name: modules, optimizers, schedulers, distributed datasets or
            their iterators, `Variable`s, and all other objects that have the methods `state_dict`
            and `load_state_dict`.

    Attributes:
        total_run_calls: How many steps a `PreemptionCheckpointHandler` has run, restarts included.
    """

    def __init__(self, **objects: Any) -> None:
        for name, one in objects.items():
            if not isinstance(one, Variable) and not (
                callable(getattr(one, "state_dict", None))
                and callable(getattr(one, "load_state_dict", None))
            ):
                raise UnsupportedError(
                    f"`{name}` cannot be saved: {in_words(one)} of type {type(one).__name__} does "
                    "not have the methods `state_dict` and `load_state_dict`. Pass an object that "
                    "has both."
                )
        self._objects = objects
        self.total_run_calls = 0

    def save(self, path: str | os.PathLike[str]) -> str:
        """Writes everything to one file. All workers call it, and the chief writes.

        The file appears under its name when it is complete. If the process is killed before, an
        older file of that name stays as it was.

        Args:
            path: The name of the file.

        Returns:
            The name of the file.

        Raises:
            UnsupportedError: If an object has a state that `torch.load` refuses without
                `weights_only=False`.
            FileExistsError: If another process has saved this file meanwhile. That file stays.
            CommunicationError: If the workers cannot go on together, or the chief could not write.
        """

        def prepare(workers: Workers) -> Callable[[], None]:
            return functools.partial(write_file, self.state(workers), Path(path))

        save_together(prepare, f"save {path}")
        return os.fspath(path)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Loads everything from a file. All workers call it, and all of them read the file.

        Args:
            path: What `save` has written.

        Raises:
            UnsupportedError: If the file does not hold a checkpoint of these objects, that of
                another number of workers whose random generators differed, or what a communication
                hook kept for another number of replicas or workers.
        """
        # No code from the file runs.
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, Mapping) or set(state) - {"hooks"} != _KEYS:
            raise UnsupportedError(
                f"{path} does not hold a checkpoint: it has {in_words(state)}. Restore a file that "
                "`Checkpoint.save` has written."
            )
        saved = state["objects"]
        if set(saved) != set(self._objects):
            raise UnsupportedError(
                f"{path} holds {sorted(saved)}, but this checkpoint has {sorted(self._objects)}. "
                "Make the checkpoint with the same names."
            )
        kept: Any = state.get("hooks")
        hook = None if kept is None else hooks.newest()
        if hook is not None and kept["kept_for"] != hook.kept_for:
            raise UnsupportedError(
                f"The checkpoint holds what a communication hook kept for {kept['kept_for']}, but "
                f"now it is called for {hook.kept_for}. Resume with {kept['kept_for']}."
            )
        self._load(state, _own(state["random"], these_workers()))
        if hook is not None:
            hook.load({number: read(*one) for number, one in enumerate(kept["contents"])})

    def _load(self, state: Mapping[str, Any], random: dict[str, Any]) -> None:
        saved = state["objects"]
        for name, one in self._objects.items():
            if isinstance(one, Variable):
                one.load(saved[name])
            else:
                one.load_state_dict(saved[name])
        self.total_run_calls = state["total_run_calls"]
        # Last, because loading may draw random numbers.
        set_random_state(random, ())
        for device, of_gpu in enumerate(random["gpus"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(of_gpu, device)

    def state(self, workers: Workers) -> dict[str, Any]:
        """Returns what to write. All workers call it."""
        return {**self.state_of([*_of_all(workers)]), "hooks": _hooks_of_all(workers)}

    def state_of(self, random: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """Returns the state as this worker has it, with the random generators of workers."""
        return {
            "objects": {
                name: one.state() if isinstance(one, Variable) else one.state_dict()
                for name, one in self._objects.items()
            },
            "random": [_random_state()] if random is None else random,
            "total_run_calls": self.total_run_calls,
        }

    def take(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_of` has returned on another worker."""
        self._load(state, state["random"][0])

    def holds(self, one: object) -> bool:
        """Whether it has the state of an input, or of an iterator of it."""
        held = self._objects.values()
        return any(own is one or getattr(own, "_dataset", None) is one for own in held)


def together(work: Callable[[Workers], T]) -> T:
    """Does what all workers do together: again, if an elastic job loses one of them meanwhile."""
    if (job := jobs.newest()) is not None:
        return job.transact(lambda: work(job.workers), lambda: None)
    return work(these_workers())


def save_together(prepare: Callable[[Workers], Callable[[], None]], what: str) -> None:
    """All workers prepare a save, and the chief then makes it.

    Raises:
        CommunicationError: If the chief could not make it. The chief raises the error itself.
    """
    failures: list[Exception] = []

    def attempt(workers: Workers) -> list[str]:
        save = prepare(workers)
        if workers.rank == 0 and not failures:
            try:
                save()
            except Exception as error:
                failures.append(error)
        said = [f"{type(error).__name__}: {error}" for error in failures]
        found: list[list[str]] = workers.gather_objects(said)
        return found[0]

    told = together(attempt)
    if failures:
        raise failures[0]
    if told:
        raise CommunicationError(f"The chief could not {what}. {told[0]}", [0])


def these_workers() -> Workers:
    """Returns the workers that this process trains with; itself alone if there are no others."""
    if (job := jobs.newest()) is not None:
        return job.workers
    found = newest_workers()
    return Workers() if found is None else ConnectedWorkers(found[0])


def _random_state() -> dict[str, Any]:
    of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {**random_state(()), "gpus": of_gpus}


def _of_all(workers: Workers) -> list[dict[str, Any]]:
    """Returns the random generators of all workers; only one state if they are equal."""
    states = workers.gather_objects(_random_state())
    first, *others = (flatten(state)[0] for state in states)
    pairs = [pair for other in others for pair in zip(first, other, strict=True)]
    differ = any(not torch.equal(a, b) if isinstance(a, Tensor) else a != b for a, b in pairs)
    return states if differ else states[:1]


def _own(states: Sequence[dict[str, Any]], workers: Workers) -> dict[str, Any]:
    size = workers.size
    if len(states) not in (1, size):
        raise UnsupportedError(
            f"The checkpoint is of {len(states)} workers with different random generators, but now "
            f"there are {size}. Resume with {len(states)} workers, or call `torch.manual_seed` "
            "with the same number on all workers before you save."
        )
    return states[0] if len(states) == 1 else states[workers.rank]


def _hooks_of_all(workers: Workers) -> dict[str, Any] | None:
    """Returns what the communication hook keeps for each replica, or for each worker."""
    hook = hooks.newest()
    if hook is None:
        return None
    own: dict[int, Any] | None = None
    try:
        own = hook.contents()
    except UnsupportedError as error:
        _log.warning("The checkpoint does not hold what the communication hook keeps. %s", error)
    found: dict[int, Any] = {}
    for one in workers.gather_objects(own):
        if one is None:
            return None
        found |= one
    contents = [write(found[number]) for number in sorted(found)]
    return {"kept_for": hook.kept_for, "contents": contents}


def write_file(state: Any, path: Path) -> None:
    """Saves `state` with `torch.save`. A process that is killed here leaves the old file whole.

    Raises:
        FileExistsError: If another process has saved this file meanwhile. That file stays.
    """
    # A process of another container may have the same number.
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}{UNFINISHED}")
    before = _identity(path)
    try:
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        # A worker may have been paused here for so long that others went on without it.
        if not unfinished.exists() or _identity(path) != before:
            raise FileExistsError(
                f"{path} was not saved, because another process has saved to its folder meanwhile. "
                "What that process saved was kept. Let only one job save to a folder."
            )
        _check_readable(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    # The new name survives a power failure, where folders can be synchronized.
    with contextlib.suppress(OSError):
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _identity(path: Path) -> tuple[int, int] | None:
    """Returns what is another after a file has been saved again; None if there is no file."""
    with contextlib.suppress(FileNotFoundError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns
    return None


def _check_readable(path: Path) -> None:
    """Reads the file without its tensors. An error now costs less than one after a restart."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError as error:
        raise UnsupportedError(
            "The checkpoint was not saved, because `torch.load(weights_only=True)` could not load "
            f"it: {str(error).splitlines()[0]} Let every `state_dict()` return tensors and plain "
            "Python values, or allow the classes with `torch.serialization.add_safe_globals`."
        ) from error
