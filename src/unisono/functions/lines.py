"""Lines of the user's program, for reasons that name them."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
import types
import warnings
from typing import NamedTuple

import torch

# Frames of these are not the user's program.
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_PYTHON = os.path.dirname(os.__file__) + os.sep
_LIBRARIES = (os.path.dirname(torch.__file__), _PACKAGE, warnings.__file__)


class _Libraries(dict[str, bool]):
    """Whether files belong to libraries. It is asked for every frame of every operator."""

    def __missing__(self, filename: str) -> bool:
        self[filename] = filename.startswith(_LIBRARIES)
        return self[filename]


_in_libraries = _Libraries()


class Line(NamedTuple):
    """A line of a file."""

    filename: str
    number: int

    def __str__(self) -> str:
        text = linecache.getline(self.filename, self.number).strip()
        return f"{self.filename}:{self.number} ({text})"


def is_ours(frame: types.FrameType) -> bool:
    """Whether a frame is one of Unisono's own."""
    return frame.f_code.co_filename.startswith(_PACKAGE)


def is_in_libraries(frame: types.FrameType) -> bool:
    """Whether a frame is one of Python, torch or Unisono."""
    filename = frame.f_code.co_filename
    is_of_python = filename.startswith((_PYTHON, "<frozen")) and "-packages" not in filename
    return is_of_python or _in_libraries[filename]


def line_here() -> Line:
    """Returns the innermost line of the user's program that is being run."""
    frame = sys._getframe(1)
    innermost = Line(frame.f_code.co_filename, frame.f_lineno)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not _in_libraries[filename]:
            return Line(filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return innermost


def line_of(error: BaseException) -> Line:
    """Returns the innermost line of the user's program that has raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    frame = (own or frames)[-1]
    return Line(frame.filename, frame.lineno or 0)
