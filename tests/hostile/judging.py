"""Whether the outcome of a call is one that a user can work with."""

from __future__ import annotations

import ast
import functools
import traceback
from pathlib import Path

import unisono as uo
from hostile.values import HostileError

OURS = str(Path(uo.__file__).parent)


def complaint(error: BaseException) -> str | None:
    """Returns what is wrong with an error; None if it is typed, or the caller's own.

    An error is fine if it is one of `unisono.errors`, if a hostile object has raised it, if the
    call itself did not fit the signature, or if a `raise` of ours has raised it. Everything else
    comes from inside: torch, NumPy or Python were given what nobody had checked.
    """
    if isinstance(error, (uo.errors.UnisonoError, HostileError)):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, TypeError) and len(frames) == 1:
        return None
    last = frames[-1]
    # A value that is nested too deeply may end the making of a message.
    is_ours = last.filename.startswith(OURS) and not isinstance(error, RecursionError)
    if is_ours and last.lineno in _raises(last.filename):
        return None
    where = f"{Path(last.filename).name}:{last.lineno}"
    ours = [one for one in frames if one.filename.startswith(OURS)]
    inside = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "nowhere of ours"
    text = " ".join(str(error).split())[:100]
    return f"{type(error).__name__} at {where}, from {inside}: {text}"


@functools.cache
def _raises(file: str) -> frozenset[int]:
    """The lines of a file on which there is a `raise`."""
    tree = ast.parse(Path(file).read_text())
    raises = (node for node in ast.walk(tree) if isinstance(node, ast.Raise))
    return frozenset(
        line for node in raises for line in range(node.lineno, (node.end_lineno or 0) + 1)
    )
