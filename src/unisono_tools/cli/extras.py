"""Packages that only some commands need."""

from __future__ import annotations

from importlib.util import find_spec

import click


class Unavailable(click.ClickException):
    """This machine lacks what a command needs; the command line ends with status 3."""

    exit_code = 3


def require(extra: str, *packages: str) -> None:
    """Ends the command unless the packages are there, and says which extra brings them."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        names = " and ".join(missing)
        raise Unavailable(
            f"This command needs {names}. Install it with: pip install 'unisono[{extra}]'"
        )
