"""The command line: one subcommand per file.

A shell starts the command at every press of TAB. So the modules of this package import only click,
each other and `unisono`, which loads nothing; a command imports torch only when it runs.
"""

from __future__ import annotations

from typing import Any

import click

import unisono
from unisono_tools.cli.bench import bench
from unisono_tools.cli.completion import completion
from unisono_tools.cli.demo import demo
from unisono_tools.cli.info import info
from unisono_tools.cli.launch import launch
from unisono_tools.cli.plan import plan
from unisono_tools.cli.trace import trace
from unisono_tools.cli.tune import tune


class _Commands(click.Group):
    """Ends with status 130 at Ctrl-C, and with a message if a file cannot be read or written."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("\nInterrupted.", err=True)
            ctx.exit(130)
        except OSError as error:
            if error.filename is None:
                raise
            raise click.ClickException(
                f"{error.filename} cannot be read or written: {error.strerror}. Check the path."
            ) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(unisono.__version__)
def main() -> None:
    """Synchronous data-parallel training for PyTorch."""


main.add_command(bench)
main.add_command(completion)
main.add_command(demo)
main.add_command(info)
main.add_command(launch)
main.add_command(trace)
main.add_command(plan)
main.add_command(tune)
