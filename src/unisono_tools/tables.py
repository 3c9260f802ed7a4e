"""Numbers and links as people say them, and tables of text."""

from __future__ import annotations

from collections.abc import Sequence

import click

LINK_NAMES = {
    "memory": "sums in one memory",
    "devices": "copies between devices",
    "inside": "processes of a host, shared memory",
    "loopback": "processes of a host, Gloo",
    "between": "hosts, Gloo",
    "tcp": "hosts, TCP",
}


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints rows under a head: the first column to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in [head, ["-" * width for width in widths], *rows]:
        cells = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        click.echo("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())


def spell_seconds(seconds: float) -> str:
    """Returns seconds with the unit that suits them.

    >>> spell_seconds(0.0000123), spell_seconds(0.0009997), spell_seconds(75), spell_seconds(7200)
    ('12.3 us', '1 ms', '75 s', '2 h')
    """
    number, unit = seconds / 3600, "h"
    for shorter, size, most in (("us", 1e-6, 999.5), ("ms", 1e-3, 999.5), ("s", 1.0, 3600.0)):
        if seconds < most * size:
            number, unit = seconds / size, shorter
            break
    return f"{number:.3g} {unit}" if number < 999.5 else f"{number:.0f} {unit}"


def spell_bytes(num_bytes: float) -> str:
    """Returns a size with the unit that suits it, in powers of 1024 as options are read.

    >>> spell_bytes(1536), spell_bytes(28 * 2**30), spell_bytes(0)
    ('1.5 KiB', '28 GiB', '0 B')
    """
    return _spelled(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def spell_rate(bytes_per_second: float) -> str:
    """Returns bytes per second with the unit that suits them, in powers of ten.

    >>> spell_rate(50e9)
    '50 GB/s'
    """
    return _spelled(bytes_per_second, 1000, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def _spelled(number: float, step: int, units: Sequence[str]) -> str:
    place = 0
    while place < len(units) - 1 and number >= step:
        number, place = number / step, place + 1
    # Three digits, and all four of 1000 to 1023.
    return f"{number:.{3 if number < 999.5 else 4}g} {units[place]}"


def change_in_words(before: float | None, now: float) -> str:
    """Returns by how much a number has changed.

    >>> change_in_words(2.0, 3.0), change_in_words(2.0, 2.0), change_in_words(None, 1.0)
    ('+50 %', 'as before', 'new')
    """
    if before is None:
        return "new"
    if before == now:
        return "as before"
    return f"{now / before - 1:+.0%}".replace("%", " %") if before else "was 0"
