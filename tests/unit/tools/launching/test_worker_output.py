from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from unisono_tools.launching.worker_output import WorkerOutput

ENVS = {rank: {"RANK": str(4 + rank), "TORCHELASTIC_RUN_ID": "run"} for rank in range(2)}


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_lines_are_copied_whole_while_files_grow(tmp_path: Path) -> None:
    out, err = io.BytesIO(), io.BytesIO()
    with WorkerOutput(tmp_path, [], out, err) as output:
        files = output.reify(ENVS)

        with open(files.stdouts[1], "wb", buffering=0) as file:
            file.write(b"one\ntw")
            wait_for(lambda: b"one" in out.getvalue())
            assert out.getvalue() == b"[worker 5] one\n"
            file.write(b"o\nlast")
        Path(files.stderrs[0]).write_bytes(b"\xff\n")

    assert out.getvalue() == b"[worker 5] one\n[worker 5] two\n[worker 5] last\n"
    assert err.getvalue() == b"[worker 4] \xff\n"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (b"10%\r20%\r\ndone\n", [b"10%", b"20%", b"done"]),
        (b"\n\n", [b"", b""]),
        (b"a\r", [b"a\r"]),
        (b"", []),
    ],
)
def test_progress_bars_are_lines(tmp_path: Path, text: bytes, lines: list[bytes]) -> None:
    out = io.BytesIO()
    with WorkerOutput(tmp_path, ["chief 0", "worker 0"], out, io.BytesIO()) as output:
        Path(output.reify(ENVS).stdouts[0]).write_bytes(text)

    assert out.getvalue() == b"".join(b"[chief 0] " + line + b"\n" for line in lines)


def test_the_last_lines_are_those_of_the_last_start(tmp_path: Path) -> None:
    with WorkerOutput(tmp_path, [], io.BytesIO(), io.BytesIO()) as output:
        for attempt in range(2):
            envs = {
                rank: env | {"TORCHELASTIC_RESTART_COUNT": str(attempt)}
                for rank, env in ENVS.items()
            }
            lines = "".join(f"{attempt}.{line}\n" for line in range(5))
            Path(output.reify(envs).stderrs[0]).write_text(lines)

        assert output.last_lines("worker 4", 2) == ["1.3", "1.4"]
        assert output.last_lines("worker 5", 2) == []
