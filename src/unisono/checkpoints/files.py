"""Files that are there as a whole or not at all."""

from __future__ import annotations

import contextlib
import copy
import os
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from unisono.errors import UnsupportedError
from unisono.values import map_leaves

UNFINISHED = ".unfinished"


def write(state: Any, path: Path) -> None:
    """Saves `state` with `torch.save`. A process that is killed here leaves the old file whole."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        _check_readable(unfinished)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    _keep_name(path.parent)


def read(path: Path) -> Any:
    """Returns what `write` has saved, in host memory. No code from the file runs."""
    return torch.load(path, map_location="cpu", weights_only=True)


def copied(state: Any) -> Any:
    """Returns a copy in host memory, which the training does not change."""

    def copy_of(leaf: Any) -> Any:
        return (
            leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else copy.deepcopy(leaf)
        )

    return map_leaves(copy_of, state)


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


def _keep_name(folder: Path) -> None:
    """Makes the new name of a file survive a power failure, where folders can be synchronized."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
