"""`unisono info`: shows the devices and libraries of this host, and what Unisono uses here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from unisono_tools.hosts import HostReport


@click.command(short_help="Shows what this host has, and what Unisono uses here.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON. `--topology` can read it elsewhere."
)
@click.option(
    "--topology",
    "recording",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Report on a recorded host instead of this one.",
)
def info(as_json: bool, recording: Path | None) -> None:  # noqa: FBT001 (click gives names)
    """Shows the devices of this host, and the reductions and communicators that Unisono uses."""
    from unisono_tools.hosts import draw, this_host

    report = this_host() if recording is None else _recorded(recording)
    click.echo(json.dumps(report.to_json(), indent=2) if as_json else draw(report))


def _recorded(path: Path) -> HostReport:
    from unisono.errors import DeviceError
    from unisono_tools.hosts import recorded_host

    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise DeviceError(
                f"A recorded host is a JSON object, got a {type(content).__name__}. Record it with "
                "`unisono info --json`."
            )
        return recorded_host(content)
    except ValueError as error:
        raise click.UsageError(f"Cannot read {path}: {error}") from None
