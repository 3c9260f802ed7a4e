"""Environment variables of a launcher, read with messages that say which one and what was found."""

from __future__ import annotations

import os
from collections.abc import Mapping

from unisono.arguments import check_optional
from unisono.cluster.spec import Address, derived_port
from unisono.errors import ClusterError


class LauncherVariables:
    """The environment as one launcher sets it."""

    def __init__(self, launcher: str, environ: Mapping[str, str] | None = None) -> None:
        check_optional("environ", environ, Mapping, "a dict of environment variables")
        self._launcher = launcher
        self._environ = os.environ if environ is None else environ

    def find(self, *names: str) -> str | None:
        """Returns the first of the variables that is set."""
        return next((str(self._environ[name]) for name in names if name in self._environ), None)

    def text(self, *names: str) -> str:
        """Returns the first of the variables that is set; one must be."""
        found = self.find(*names)
        if not found:
            raise ClusterError(
                f"{self._launcher} sets {' or '.join(names)}, but it is "
                f"{'missing' if found is None else 'empty'} here{self._beside(names)}. Start the "
                f"script with {self._launcher}, or set the variable."
            )
        return found

    def number(self, *names: str) -> int:
        """Returns the first of the variables that is set, which must hold a number of 0 or more."""
        text = self.text(*names)
        if not (text.isascii() and text.isdigit()):
            name = next(name for name in names if name in self._environ)
            raise ClusterError(
                f"{name} must be a whole number of 0 or more, as {self._launcher} sets it; found "
                f"{text!r}. Start the script with {self._launcher}, or unset the variable."
            )
        return int(text)

    def number_or(self, default: int, *names: str) -> int:
        """Returns the first of the variables that is set, as a number, or `default`."""
        return default if self.find(*names) is None else self.number(*names)

    def rank_and_size(self, rank: tuple[str, ...], size: tuple[str, ...]) -> tuple[int, int]:
        """Returns a rank and the number of ranks, which must go together."""
        found_rank, found_size = self.number(*rank), self.number(*size)
        if found_rank >= found_size:
            raise ClusterError(
                f"{' or '.join(rank)} must be less than {' or '.join(size)}; found {found_rank} "
                f"of {found_size}. Start the script with {self._launcher}, or set both alike."
            )
        return found_rank, found_size

    def _beside(self, names: tuple[str, ...]) -> str:
        """The variables of the same family that are set, for a message."""
        family = {name.split("_")[0] for name in names} | {"RANK", "WORLD", "MASTER"}
        found = [
            f"{name}={text!r}"
            for name, text in sorted(self._environ.items(), key=str)
            if isinstance(name, str) and name.split("_")[0] in family and name not in names
        ]
        return f" (found {', '.join(found[:8])})" if found else ""


COORDINATOR = "UNISONO_COORDINATOR"


def coordinator_address(
    variables: LauncherVariables, job: str, host: str | None, port: int | None
) -> Address | None:
    """Returns the address of rank 0, or None if nobody tells its host.

    UNISONO_COORDINATOR comes first, then MASTER_ADDR and MASTER_PORT, then the host and the port
    given; without a port, one derived from the name of the job.
    """
    whole = variables.find(COORDINATOR)
    if whole is not None:
        return Address.parse(whole)
    named = variables.find("MASTER_ADDR") or host
    if named is None:
        return None
    return Address(named, port or variables.number_or(derived_port(job), "MASTER_PORT"))
