"""Makes `python -m unisono.cli` the command `unisono`."""

from unisono.cli.main import main

main(prog_name="unisono")
