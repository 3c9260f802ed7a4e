"""Kinds of options that the commands share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any] | click.Command)

_BYTES = re.compile(r"(\d+(?:\.\d+)?(?:e\d\d?)?)([KMGT]?)(i?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str) -> int:
    """Returns the bytes of a text such as 64, 4K, 4KB, 4KiB or 28e9: units are powers of 1024."""
    found = _BYTES.fullmatch(text)
    number = Decimal(found[1]) * _UNITS[found[2].upper()] if found else Decimal()
    if number < 1 or number != int(number):
        raise click.BadParameter(
            f"{text!r} is not a size. Write a number of bytes such as 64, 4K, 1.5G or 28e9."
        )
    return int(number)


class OutputPath(click.Path):
    """A file to write later, in a folder that must exist now.

    Args:
        suffixes: The allowed endings of its name; empty allows all.
        allow_dash: Whether `-` stands for the standard output.
    """

    def __init__(self, *suffixes: str, allow_dash: bool = False) -> None:
        super().__init__(dir_okay=False, writable=True, allow_dash=allow_dash, path_type=Path)
        self._suffixes = suffixes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType`."""
        path = Path(str(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"the folder {str(path.parent)!r} does not exist.", param, ctx)
        if self._suffixes and path.suffix not in self._suffixes:
            self.fail(f"{str(path)!r} must end in {' or '.join(self._suffixes)}.", param, ctx)
        return path


def plot_option(name: str = "plot", **settings: Any) -> Callable[[F], F]:
    """Returns the option `--plot FILE`, whose value a command gets as its argument `name`."""
    settings = {"help": "Draw a picture into FILE, such as out.png."} | settings
    path = OutputPath(".png", ".svg", ".pdf")
    return click.option("--plot", name, metavar="FILE", type=path, **settings)


quick_option = click.option("--quick", is_flag=True, help="Fewer sizes and shorter runs.")


class ListCommand(click.Command):
    """A command whose repeatable options also take several values: `--ranks 2 4 8` or `2,4,8`.

    It must have no arguments, which would be taken for such values.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See `click.Command`."""
        return super().parse_args(ctx, list(self._repeated(args)))

    def _repeated(self, words: list[str]) -> Iterator[str]:
        """The words with the name of a repeatable option before each of its values."""
        repeatable = {
            name
            for parameter in self.params
            if isinstance(parameter, click.Option) and parameter.multiple
            for name in parameter.opts
        }
        option, has_value = "", False
        for word in _apart(words, repeatable):
            if word.startswith("-") and word != "-":
                option, has_value = word, False
                yield word
            elif option in repeatable:
                for value in filter(None, word.split(",")):
                    if has_value:
                        yield option
                    yield value
                    has_value = True
            else:
                yield word


def _apart(words: list[str], options: set[str]) -> Iterator[str]:
    """The words with an option and its value apart: `--ranks 2` for `--ranks=2`."""
    for word in words:
        name, _, value = word.partition("=")
        yield from [name, value] if value and name in options else [word]
