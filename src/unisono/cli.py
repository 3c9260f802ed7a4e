"""`python -m unisono.cli`: the command `unisono`. Nothing in the package imports this."""

from unisono_tools.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    main(prog_name="unisono")
