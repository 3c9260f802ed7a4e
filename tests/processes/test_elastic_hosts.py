"""Hosts of an elastic job come, are lost and are preempted; launchers start the others again."""

from __future__ import annotations

import hashlib
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo
from processes.ports import free_ports
from processes.programs import Program, clean_environment, launcher, program, run

# Trains 24 steps. What happens to whom at which step is the argument.
SCRIPT = """
import hashlib, os, signal, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import unisono as uo

folder, fate = sys.argv[1], dict(one.split("=") for one in sys.argv[2:])
signals = []
signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
options = uo.experimental.CommunicationOptions(timeout_seconds=100)
strategy = uo.MultiWorkerMirroredStrategy(None, options, num_replicas=4, elastic=True)
torch.manual_seed(0)
with strategy.scope():
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(80, 4)), 16, shuffle=True)
batches = strategy.experimental_distribute_dataset(loader)

def on_replica(x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()

def step(x):
    strategy.run(on_replica, args=(x,))

def wait_for(condition):
    deadline = time.monotonic() + 150
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)

checkpoint = uo.experimental.Checkpoint(model=model, optimizer=optimizer, input=batches)
handler = uo.experimental.PreemptionCheckpointHandler(
    strategy.cluster_resolver, checkpoint, os.path.join(folder, "saved")
)
print("from step", handler.total_run_calls, flush=True)
members = strategy.extended.elastic.members
wanted = 0
while handler.total_run_calls < 24:
    for (x,) in batches:
        what = fate.get(str(handler.total_run_calls))
        if what == "let in":
            print("waiting", flush=True)
            wanted = len(members.met.members) + 1
        if len(members.met.members) < wanted:
            # One that comes late to a meeting is let in at the next one.
            wait_for(members.newcomers)
        if what == "be lost":
            print("training with", len(members.met.members), flush=True)
            time.sleep(600)
        elif what == "die" and os.environ["RANK"] == "1" and not os.path.exists(folder):
            os.mkdir(folder)
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "end":
            os.kill(os.getppid(), signal.SIGTERM)
            wait_for(lambda: signals)
            time.sleep(1.1)
        handler.run(step, x)
        if handler.total_run_calls == 24:
            break
print("weights", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest(), flush=True)
handler.close()
strategy.close()
"""


def undisturbed() -> str:
    """The weights that one process finds."""
    strategy = uo.MultiWorkerMirroredStrategy(num_replicas=4)
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Linear(4, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(80, 4)), 16, shuffle=True)
    batches = strategy.experimental_distribute_dataset(loader)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    num_steps = 0
    while num_steps < 24:
        for (x,) in batches:
            strategy.run(step, args=(x,))
            num_steps += 1
            if num_steps == 24:
                break
    strategy.close()
    return f"weights {hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest()}"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def wait_for_line(process: Program, words: str) -> str:
    """Reads what a program prints until a line has some words, and returns that line."""
    assert process.stdout is not None
    lines = []
    while line := process.stdout.readline():
        lines.append(line)
        if words in line:
            return line
    raise AssertionError(f"{words!r} is not in {lines}: {process.communicate(timeout=60)}")


def test_hosts_come_and_go_and_the_bits_stay_the_same(tmp_path: Path, script: Path) -> None:
    ports = free_ports(2)
    endpoints = ",".join(f"127.0.0.1:{port}" for port in ports)
    options = ["-n", "1", "--elastic", "--nnodes", "1:3", "--rdzv-endpoint", endpoints]
    command = launcher(*options, "--rdzv-conf", "last_call_timeout=1", script, tmp_path / "folder")
    environ = clean_environment(
        UNISONO_JOB_TOKEN="secret", OMP_NUM_THREADS="1", TMPDIR=str(tmp_path)
    )

    with program([*command, "3=let in", "6=be lost"], environ) as first:
        wait_for_line(first, "waiting")
        with program([*command, "9=let in", "14=end"], environ) as second:
            line = wait_for_line(first, "training with")
            if "training with 2" not in line:
                second.send_signal(signal.SIGTERM)
                raise AssertionError((line, second.communicate(timeout=60)))
            # With the launcher, the host of the first endpoint and its worker are lost.
            first.send_signal(signal.SIGKILL)
            wait_for_line(second, "waiting")
            with program(command, environ) as third:
                output, errors = third.communicate(timeout=200)
            output_of_second, errors_of_second = second.communicate(timeout=200)

    assert third.returncode == 0, (errors, output_of_second, errors_of_second)
    assert undisturbed() in output
    assert re.search(r"from step 1\d", output)
    assert second.returncode == 0, errors_of_second
    assert "Lost worker 0:" in errors_of_second
    assert "Worker 1 left: worker 2 takes over" in errors
    assert not (tmp_path / "folder").exists()


def test_torchrun_restarts_all_workers_after_a_loss_and_no_step_is_lost(
    tmp_path: Path, script: Path
) -> None:
    folder = tmp_path / "folder"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--max-restarts=1", str(script), str(folder), "7=die"]

    status, output, errors = run(command, clean_environment(OMP_NUM_THREADS="1"))

    assert status == 0, errors
    # The other worker has gone on with all replicas until torchrun ended it, and has saved.
    steps = [int(step) for step in re.findall(r"from step (\d+)", output)]
    assert steps[0] == 0
    assert steps[-1] >= 8
    assert undisturbed() in output
