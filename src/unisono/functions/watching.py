"""What a replica on a CPU calls that is no operator: seen by a profile function of Python.

A mode of torch would see most of it, too, but under such a mode torch avoids its fast paths, which
have other bits.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor

from unisono.engines import names_in
from unisono.functions.lines import is_in_libraries, is_ours, line_here

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


class Watching:
    """Within the block, on this thread: tells of what no replay would do or see.

    Args:
        refuse: Takes a reason.
        is_on: Whether it counts at the moment.
        named: Takes the names in the code of all functions of the program that are called.
    """

    def __init__(
        self, refuse: Callable[[str], None], is_on: Callable[[], bool], named: set[str]
    ) -> None:
        self._refuse = refuse
        self._is_on = is_on
        self._named = named
        self._seen: set[types.CodeType] = set()

    def __enter__(self) -> None:
        sys.setprofile(self._note)

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: types.FrameType, event: str, arg: Any) -> None:
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
            elif arg.__module__ == "time" and self._is_on() and not is_in_libraries(frame):
                self._refuse(f"it reads the clock at {line_here()}")

    def _note_reading(self, frame: types.FrameType | None, name: str = "") -> None:
        if frame is None or is_ours(frame) or not self._is_on():
            return
        if name not in _ADDRESSES or not frame.f_globals.get("__name__", "").startswith("torch."):
            self._refuse(f"it reads the values of a tensor at {line_here()}")
