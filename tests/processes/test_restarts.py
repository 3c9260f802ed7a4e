"""Workers that are killed at random and started again end with the bits of an undisturbed run."""

from __future__ import annotations

import os
import random
import re
import runpy
import signal
import time
from pathlib import Path

import pytest
import torch

from processes.programs import clean_environment, is_alive, launcher, program

EXAMPLE = Path(__file__).parents[2] / "examples" / "many_workers.py"
STEPS, EVERY = 40, 4
# Each costs another start of all workers. A longer test can ask for more.
KILLS = int(os.environ.get("UNISONO_KILLS", "1"))


def arguments(checkpoint: Path) -> list[str | Path]:
    return [EXAMPLE, "--steps", str(STEPS), "--every", str(EVERY), "--checkpoint", checkpoint]


def bits(output: str) -> str:
    found = re.findall(r"2 replicas, loss [\d.]+, bits (\w+)", output)
    assert len(found) == 1, output
    return str(found[0])


def workers_of(process_id: int) -> list[int]:
    """The children of a launcher."""
    try:
        found = Path(f"/proc/{process_id}/task/{process_id}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(one) for one in found.split()]


def kill_some(launcher_id: int, checkpoint: Path, seed: int, num_kills: int) -> list[int]:
    """Kills a random worker some time after each of several checkpoints, and returns whom."""
    rng = random.Random(seed)
    killed: list[int] = []
    deadline = time.monotonic() + 200
    for _ in range(num_kills):
        before = _saved_at(checkpoint)
        while _saved_at(checkpoint) == before and is_alive(launcher_id):
            assert time.monotonic() < deadline, f"no checkpoint came after {len(killed)} kills"
            time.sleep(0.005)
        time.sleep(rng.random() * 0.05)
        if workers := [one for one in workers_of(launcher_id) if one not in killed]:
            killed.append(rng.choice(workers))
            os.kill(killed[-1], signal.SIGKILL)
    return killed


def _saved_at(checkpoint: Path) -> int:
    return checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0


def undisturbed(monkeypatch: pytest.MonkeyPatch) -> str:
    """The bits of a run in this process, which nobody kills."""
    # The example sets the number of threads, which must not outlast the test.
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    main = runpy.run_path(str(EXAMPLE))["main"]
    return str(main(["--replicas", "2", "--steps", str(STEPS)]))


def test_killed_workers_end_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    checkpoint = tmp_path / "digits.pt"
    environ = clean_environment(TMPDIR=str(tmp_path))
    command = launcher("-n", "2", "--max-restarts", str(KILLS), *arguments(checkpoint))

    with program(command, environ) as process:
        killed = kill_some(process.pid, checkpoint, seed, KILLS)
        output, errors = process.communicate(timeout=200)

    assert process.returncode == 0, errors
    assert len(killed) == KILLS
    assert not [one for one in killed if is_alive(one)]
    assert bits(output) == undisturbed(monkeypatch)
