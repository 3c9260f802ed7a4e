"""`unisono trace`: shows a recorded run as a timeline and in numbers."""

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
    help="File for the timeline. Default: FOLDER/timeline.json.",
)
@click.option(
    "--summary", "only_summary", is_flag=True, help="Print only the summary, without a timeline."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print the summary as JSON, with times in seconds."
)
def trace(
    folder: Path,
    output: Path | None,
    only_summary: bool,  # noqa: FBT001 (click gives all options by name)
    as_json: bool,  # noqa: FBT001
) -> None:
    """Merges the traces that the workers recorded in FOLDER.

    Writes a timeline for https://ui.perfetto.dev or chrome://tracing. Prints how each replica spent
    its steps, and which replica the others waited for. To record a run, set UNISONO_TRACE=FOLDER,
    or use `unisono.tracing.record(FOLDER)` in the program.
    """
    from unisono.errors import TraceError, UnisonoError
    from unisono.tracing import read_folder
    from unisono_tools.traces import align, summarise, timeline

    if only_summary and output is not None:
        raise click.UsageError("--summary writes no timeline: leave out --output.")
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
        # The timeline is useful even without a step.
        if only_summary or as_json:
            raise click.ClickException(str(error)) from None
        click.echo(f"There is no summary. {error}", err=True)
        return
    click.echo(json.dumps(summary.as_dict(), indent=1) if as_json else summary)
