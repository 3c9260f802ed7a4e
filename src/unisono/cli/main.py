"""The command line: one subcommand a file."""

from __future__ import annotations

import click

from unisono.cli.info import info
from unisono.cli.launch import launch
from unisono.cli.plan import plan
from unisono.cli.trace import trace
from unisono.cli.tune import tune


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="unisono")
def main() -> None:
    """Synchronous data-parallel training for PyTorch."""


main.add_command(info)
main.add_command(launch)
main.add_command(trace)
main.add_command(plan)
main.add_command(tune)
