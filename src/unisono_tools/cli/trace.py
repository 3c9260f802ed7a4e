"""`unisono trace`: a recorded run as a timeline, and in numbers."""

from __future__ import annotations

import json
from pathlib import Path

import click

from unisono_tools.cli.parameters import OutputPath


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=OutputPath(),
    help="Where the timeline goes. Without it: FOLDER/timeline.json.",
)
@click.option("--summary", "only_summary", is_flag=True, help="Write no timeline.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def trace(
    folder: Path,
    output: Path | None,
    only_summary: bool,  # noqa: FBT001 (click gives all options by name)
    as_json: bool,  # noqa: FBT001
) -> None:
    """Merges what the workers have recorded into FOLDER.

    Writes a timeline that https://ui.perfetto.dev and chrome://tracing open, and prints where the
    steps went and who was waited for. To record a run, set UNISONO_TRACE=FOLDER or use
    `unisono.tracing.record(FOLDER)` in the program.
    """
    from unisono.errors import TraceError, UnisonoError
    from unisono.tracing import read_folder
    from unisono_tools.traces import align, summarise, timeline

    if only_summary and output is not None:
        raise click.UsageError("--summary writes no timeline, so there is nothing for --output.")
    try:
        workers = align(read_folder(folder))
    except UnisonoError as error:
        raise click.ClickException(str(error)) from None
    if not only_summary:
        path = output or folder / "timeline.json"
        path.write_text(json.dumps(timeline(workers)))
        click.echo(f"Open {path} in https://ui.perfetto.dev", err=True)
    try:
        summary = summarise(workers)
    except TraceError as error:
        # What was done outside of steps can be looked at all the same.
        if only_summary or as_json:
            raise click.ClickException(str(error)) from None
        click.echo(f"There is no summary. {error}", err=True)
        return
    click.echo(json.dumps(summary.as_dict(), indent=1) if as_json else summary)
