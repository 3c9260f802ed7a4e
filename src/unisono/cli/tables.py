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

    >>> spell_seconds(0.0000123), spell_seconds(0.25), spell_seconds(75)
    ('12.3 us', '250 ms', '75 s')
    """
    for unit, size in (("h", 3600.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def spell_bytes(num_bytes: float) -> str:
    """Returns bytes with the unit that suits them, in powers of ten.

    >>> spell_bytes(1536), spell_bytes(28e9), spell_bytes(0)
    ('1.54 kB', '28 GB', '0 B')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.3g} B"


def spell_rate(bytes_per_second: float) -> str:
    """Returns bytes per second with the unit that suits them."""
    return f"{spell_bytes(bytes_per_second)}/s"


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
