"""Python programs, each in its own process, with a deadline, and none left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from processes.forked import ForkedProgram

# What the launchers set; a test starts from an environment without them.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")
LAUNCHERS = (*TORCHRUN, "TF_CONFIG", "SLURM_", "OMPI_", "PMI", "MPI_", "UNISONO_")
# Their own start, which imports torch, is not what the tests are about.
FORKED = (["-m", "unisono", "launch"], ["-m", "torch.distributed.run"])

Program = subprocess.Popen[str] | ForkedProgram


def clean_environment(**variables: str) -> dict[str, str]:
    """The environment of this process without a launcher and a tuning, and with `variables`."""
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(LAUNCHERS)}
    return inherited | {"UNISONO_TUNING": "off"} | variables


@contextmanager
def program(
    command: Sequence[str | Path], environ: Mapping[str, str] | None = None
) -> Iterator[Program]:
    """A process in its own session; what is left of the session is killed at the end."""
    words = [str(part) for part in command]
    variables = clean_environment() if environ is None else dict(environ)
    is_forked = words[0] == sys.executable and any(words[1 : len(one) + 1] == one for one in FORKED)
    with ForkedProgram(words[1:], variables) if is_forked else _popen(words, variables) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _popen(words: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(
    command: Sequence[str | Path],
    environ: Mapping[str, str] | None = None,
    timeout_seconds: float = 200,
) -> tuple[int, str, str]:
    """The exit status, the standard output and the standard error of a program."""
    with program(command, environ) as process:
        output, errors = process.communicate(timeout=timeout_seconds)
    return process.returncode, output, errors


def run_together(
    command: Sequence[str | Path],
    environs: Sequence[Mapping[str, str]],
    timeout_seconds: float = 200,
) -> list[tuple[int, str, str]]:
    """What `run` returns, for programs that run at the same time."""
    with ExitStack() as stack:
        processes = [stack.enter_context(program(command, environ)) for environ in environs]
        outputs = [process.communicate(timeout=timeout_seconds) for process in processes]
    return [
        (process.returncode, *output) for process, output in zip(processes, outputs, strict=True)
    ]


def launcher(*arguments: str | Path) -> list[str | Path]:
    return [sys.executable, "-m", "unisono", "launch", *arguments]


def wait_until_gone(process_ids: Sequence[int], timeout_seconds: float = 100) -> list[int]:
    """The processes that are still alive when the time is over."""
    deadline = time.monotonic() + timeout_seconds
    while (alive := [one for one in process_ids if is_alive(one)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def is_alive(process_id: int) -> bool:
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # A zombie has ended. The process that inherits it collects it.
    return status.rpartition(")")[2].split()[0] != "Z"
