"""A program in a separate interpreter, which may have other packages than this one."""

from __future__ import annotations

import json
import select
import subprocess
from pathlib import Path
from typing import Any

from unisono_tools.benchmarks.failure import BenchmarkError
from unisono_tools.benchmarks.peers.crew import DEADLINE_S, PATIENCE_S, deaf_to_ctrl_c


class CoProcess:
    """A script of this folder that answers a line of JSON with a line of JSON.

    Args:
        name: What errors call it.
        interpreter: The Python that runs it.
        script: Its file.
        arguments: The arguments of the script.
    """

    def __init__(self, name: str, interpreter: str, script: str, *arguments: str) -> None:
        self._name = name
        command = [interpreter, str(Path(__file__).with_name(script)), *arguments]
        try:
            with deaf_to_ctrl_c():
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
        except OSError as error:
            raise BenchmarkError(
                f"{name}: {interpreter} cannot be started: {error}. Check the path of the "
                "interpreter."
            ) from None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            print(json.dumps(request), file=stdin, flush=True)
            ready, _, _ = select.select([stdout], [], [], DEADLINE_S)
            line = stdout.readline() if ready else None
        except BrokenPipeError:
            line = ""
        if line is None:
            raise BenchmarkError(
                f"{self._name} did not answer in {DEADLINE_S:g} s when asked {request}. Try its "
                "interpreter by hand."
            )
        if not line:
            status = self._process.wait(timeout=10)
            raise BenchmarkError(
                f"{self._name} ended with status {status} when asked {request}. Check its messages "
                "above, and try its interpreter by hand."
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends the program, which ends with its input."""
        try:
            self._process.communicate(timeout=PATIENCE_S)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.communicate(timeout=10)
