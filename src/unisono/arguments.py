"""Checks of arguments: what was asked, what was given, and what to write instead."""

from __future__ import annotations

import operator
import warnings
from typing import Any

from unisono.errors import UnsupportedError

# So long may a value be in a message.
_MAX_LETTERS = 200
# Seconds, about 31 years. Longer waits overflow the clocks of the systems that they are given to.
_LONGEST_WAIT = 1e9


def in_words(value: Any) -> str:
    """Returns what a message calls a value: its `repr`, cut short, and its type if that fails."""
    try:
        text = repr(value)
    except Exception:
        # It may hold itself, or be nested too deeply, or have a `repr` that fails.
        return f"an object of type {type(value).__name__}"
    return text if len(text) <= _MAX_LETTERS else f"{text[:_MAX_LETTERS]}..."


def check_int(name: str, value: Any, least: int | None = None) -> int:
    """Returns `value` as an int: a Python or NumPy integer, `least` or more if that is given."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        raise UnsupportedError(
            f"`{name}` must be an int, got {in_words(value)} of type {type(value).__name__}."
        ) from None
    if least is not None and number < least:
        raise UnsupportedError(f"`{name}` must be {least} or more, got {number}.")
    return number


def check_bool(name: str, value: Any) -> bool:
    """Returns `value`, which must be a bool."""
    if not isinstance(value, bool):
        raise UnsupportedError(
            f"`{name}` must be True or False, got {in_words(value)} of type {type(value).__name__}."
        )
    return value


def check_timeout(name: str, value: float | None) -> float | None:
    """Returns a number of seconds, or None for the default."""
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Also False for nan.
    if not (is_number and 0 <= value <= _LONGEST_WAIT):
        raise UnsupportedError(
            f"`{name}` must be a number of seconds from 0 to {_LONGEST_WAIT:.0e}, or None for the "
            f"default, got {in_words(value)}. An endless timeout would hide a lost worker."
        )
    return value


def check_callable(name: str, value: Any) -> None:
    """Raises unless `value` can be called."""
    if not callable(value):
        raise UnsupportedError(
            f"`{name}` must be a function or another callable, got {in_words(value)} of type "
            f"{type(value).__name__}. Pass the function itself, and not what it returns."
        )


def check_call(name: str, fn: Any, args: Any, kwargs: Any) -> None:
    """Raises unless `fn(*args, **kwargs)` is a call; `kwargs` may be None."""
    check_callable(name, fn)
    if not isinstance(args, (list, tuple)):
        raise UnsupportedError(
            f"`args` must be a list or tuple, got {type(args).__name__}. Write `args=(x,)` for a "
            "single argument."
        )
    if kwargs is None:
        return
    if not isinstance(kwargs, dict) or not all(isinstance(name, str) for name in kwargs):
        raise UnsupportedError(
            f"`kwargs` must be a dict from names to values, got {in_words(kwargs)}. Write "
            "`kwargs={'x': x}` for the argument `x`."
        )


def check_optional(name: str, value: Any, kind: type, wanted: str) -> None:
    """Raises unless `value` is None or of a `kind`; `wanted` says in words which."""
    if value is not None:
        check_instance(name, value, kind, wanted)


def check_iterable(name: str, values: Any) -> list[Any]:
    """Returns what can be iterated as a list."""
    try:
        iterator = iter(values)
    except (TypeError, RuntimeError):
        raise UnsupportedError(
            f"`{name}` must be a list, tuple or another iterable, got {in_words(values)} of type "
            f"{type(values).__name__}."
        ) from None
    return list(iterator)


def check_instance(name: str, value: Any, kind: type | tuple[type, ...], wanted: str) -> None:
    """Raises unless `value` is of a `kind`; `wanted` says in words which."""
    if isinstance(value, kind):
        return
    if isinstance(value, type) and issubclass(value, kind):
        raise UnsupportedError(
            f"`{name}` must be {wanted}, got the class itself. Write `{value.__name__}()`."
        )
    raise UnsupportedError(
        f"`{name}` must be {wanted}, got {in_words(value)} of type {type(value).__name__}."
    )


def warn_of_older(what: str, today: str, *, is_deeper: bool = False) -> None:
    """Says what to write today, to the caller of the function that calls this, or to the next."""
    warnings.warn(
        f"`{what}` is an older name; write `{today}`.",
        DeprecationWarning,
        stacklevel=4 if is_deeper else 3,
    )
