"""Steps that are captured once, and replayed without Python."""

from unisono.functions.captures import Captures
from unisono.functions.step_function import Function, function

__all__ = ["Captures", "Function", "function"]
