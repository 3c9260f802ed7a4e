"""The first moments of the command `unisono`.

A shell asks the command what to complete at each press of TAB, and for a script when it starts.
Both are answered from `commands.json`, a description of the commands, because `import unisono`
loads torch, which takes seconds. So this package stands apart from `unisono`.
"""

from __future__ import annotations

import os
import sys

from unisono_command.completion import COMPLETE, completion
from unisono_command.description import FILE, described, restored

__all__ = ["FILE", "completion", "described", "main", "restored"]


def main() -> None:
    """Completes what a shell asks for, or else runs the command."""
    if COMPLETE in os.environ or sys.argv[1:2] == [completion.name]:
        commands = restored(FILE.read_text())
        commands.add_command(completion)
    else:
        from unisono.cli.main import main as commands
    commands(prog_name="unisono")
