"""The command `unisono`."""

from unisono.cli.main import main

__all__ = ["main"]
