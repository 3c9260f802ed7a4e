"""What a replica on a CPU calls that is no operator, and the lines of the program that call it.

A profile function of Python sees it. A mode of torch would see most of it, too, but under such a
mode torch avoids its fast paths, which have other bits.
"""

from __future__ import annotations

import linecache
import os
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from unisono.engines import names_in

if TYPE_CHECKING:
    from unisono.functions.tape import Noting

# These bring the values of a tensor to Python without an operator.
_READING = frozenset(
    {
        *("__array__", "__deepcopy__", "__dlpack__", "__format__", "__reduce_ex__", "__repr__"),
        *("data_ptr", "numpy", "storage", "tolist", "untyped_storage"),
    }
)
# What torch itself does with these depends on no value.
_ADDRESSES = frozenset({"data_ptr", "untyped_storage"})
_OF_PYTHON = frozenset(
    getattr(Tensor, name).__code__
    for name in _READING
    if isinstance(getattr(Tensor, name), types.FunctionType)
)
# In C++, these may read where a tensor is to be divided.
_DIVIDING = frozenset({"_pad_packed_sequence", "tensor_split"})
# In C++, these read the values of tensors inside lists, which no mode for operators sees.
_MAKING = frozenset({"as_tensor", "asarray", "new", "new_tensor", "tensor"})
# No operator shows these, and bits need not show them: the seed may be the one that is set already.
_SEEDING = frozenset({"manual_seed", "seed"})
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


def _is_of_libraries(frame: types.FrameType) -> bool:
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


class _Arguments(TorchFunctionMode):
    """While C++ makes a tensor: says whether it is given tensors inside lists."""

    def __init__(self, refuse: Callable[[types.FrameType | None], None]) -> None:
        self._refuse = refuse
        self._making: str | None = None
        self.is_making = False

    def begin(self, name: str) -> None:
        """Before a function is called."""
        self._making = name
        self.__enter__()  # type: ignore[no-untyped-call]

    def end(self, name: str) -> None:
        """After a function was called, which may be another."""
        if name == self._making:
            self._making = None
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Calls the function."""
        kwargs = kwargs or {}
        if any(map(_holds_tensors, (*args, *kwargs.values()))):
            self._refuse(sys._getframe(1))
        self.is_making = True
        try:
            return func(*args, **kwargs)
        finally:
            self.is_making = False


def _is_of_torch(function: Any) -> bool:
    return function.__module__ == "torch" or isinstance(function.__self__, Tensor)


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and any(
        isinstance(one, Tensor) or _holds_tensors(one) for one in value
    )


class Watching:
    """Within the block, on this thread: tells of what no replay would do or see.

    Args:
        refuse: Takes a reason.
        noting: What has a tape as long as it counts.
        named: Takes the names in the code of all functions of the program that are called.
    """

    def __init__(self, refuse: Callable[[str], None], noting: Noting, named: set[str]) -> None:
        self._refuse = refuse
        self._noting = noting
        self._named = named
        self._seen: set[types.CodeType] = set()
        self._arguments = _Arguments(self._note_reading)

    def __enter__(self) -> None:
        # That of `outsiders`, for example.
        self._outer: Any = sys.getprofile()
        sys.setprofile(self._note)

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._outer)

    def _note(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if self._outer is not None:
            self._outer(frame, event, arg)
        if self._arguments.is_making:
            return
        if event == "call":
            code = frame.f_code
            if code in _OF_PYTHON:
                self._note_reading(frame.f_back)
            elif code not in self._seen and self._is_on():
                self._seen.add(code)
                if not _is_of_libraries(frame):
                    self._named |= {code.co_name} | names_in(code)
        elif event == "c_call":
            name = arg.__name__
            is_reading = name in _READING and isinstance(arg.__self__, Tensor)
            if is_reading or name in _DIVIDING:
                self._note_reading(frame, name)
            elif name in _MAKING and self._is_on() and _is_of_torch(arg):
                self._arguments.begin(name)
            elif name in _SEEDING and isinstance(arg.__self__, torch.Generator):
                self._refuse_here("seeds a random generator", frame)
            elif name == "set_state" and (tape := self._noting.tape) is not None:
                tape.has_drawn |= isinstance(arg.__self__, torch.Generator)
            elif arg.__module__ == "time" and not _is_of_libraries(frame):
                self._refuse_here("reads the clock", frame)
        elif event != "return":
            self._arguments.end(arg.__name__)

    def _is_on(self) -> bool:
        return self._noting.tape is not None

    def _note_reading(self, frame: types.FrameType | None, name: str = "") -> None:
        if frame is None:
            return
        if name not in _ADDRESSES or not frame.f_globals.get("__name__", "").startswith("torch."):
            self._refuse_here("reads the values of a tensor", frame)

    def _refuse_here(self, what: str, frame: types.FrameType) -> None:
        if not frame.f_code.co_filename.startswith(_PACKAGE) and self._is_on():
            self._refuse(f"it {what} at {line_here()}")
