"""The command `unisono`."""

from unisono_tools.cli.main import main

__all__ = ["main"]
