"""What several commands need: optional packages, and a quiet torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import click

_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"


class Unavailable(click.ClickException):
    """This machine lacks something that a command needs. The exit status is 3."""

    exit_code = 3


def require(extra: str, *packages: str) -> None:
    """Ends the command unless the packages are installed, and names the extra that has them."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        names = " and ".join(missing)
        raise Unavailable(
            f"This command needs {names}. Install it with: pip install 'unisono[{extra}]'"
        )


@contextmanager
def quiet_torch() -> Iterator[None]:
    """Keeps torch's C++ code, if it is first imported here, from logging what it also raises.

    c10d warns of every host name that it cannot look up, and prints stack traces when it tries to
    connect again. Processes that start meanwhile are quiet, too. A level that the user has set is
    kept.
    """
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "FATAL"
    try:
        yield
    finally:
        del os.environ[_LOG_LEVEL]
