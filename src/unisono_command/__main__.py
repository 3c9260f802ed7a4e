"""Rewrites the description of the commands: `python -m unisono_command`."""

from unisono.cli.main import main
from unisono_command import FILE, described

FILE.write_text(described(main))
