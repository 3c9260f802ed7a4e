"""Ctrl-C ends a command with all processes that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from processes.programs import is_alive, program, wait_until_gone


def test_ctrl_c_ends_all_processes_without_a_word_too_many() -> None:
    pytest.importorskip("rich")
    words = ["bench", "all-reduce", "--ranks", "2", "--sizes", "64", "--seconds", "60"]

    with program([sys.executable, "-m", "unisono", *words]) as process:
        assert isinstance(process, subprocess.Popen)
        started = five_of_group(process.pid)
        forked = [one for one in started if "forkserver" in command_of(one)]
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=200)
        alive = [one for one in forked if is_alive(one)]
        _, errors = process.communicate(timeout=200)

    # The ranks and the process that they are forked from, which takes a second to end by itself.
    assert (len(forked), alive) == (3, [])
    assert process.returncode == 130
    assert "Interrupted." in errors
    assert "Traceback" not in errors
    assert wait_until_gone(started) == []


def five_of_group(group: int) -> list[int]:
    """The benchmark, two ranks, what forks and what watches them, as soon as all are there."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        everybody = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
        found = [one for one in everybody if is_alive(one) and group_of(one) == group]
        if len(found) == 5:
            return found
        time.sleep(0.05)
    raise AssertionError("The processes did not start in time.")


def command_of(process_id: int) -> str:
    return Path(f"/proc/{process_id}/cmdline").read_text()


def group_of(process_id: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getpgid(process_id)
    return None
