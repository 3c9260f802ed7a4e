"""What a replica on a CPU calls that is no operator: seen by a profile function of Python.

A mode of torch would see most of it, too, but under such a mode torch avoids its fast paths, which
have other bits.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from unisono.engines import names_in
from unisono.functions.lines import is_in_libraries, is_ours, line_here
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
                if not is_in_libraries(frame):
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
            elif arg.__module__ == "time" and not is_in_libraries(frame):
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
        if not is_ours(frame) and self._is_on():
            self._refuse(f"it {what} at {line_here()}")
