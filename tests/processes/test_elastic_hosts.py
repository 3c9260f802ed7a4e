"""Hosts of an elastic job come, are lost and are preempted; launchers start the others again."""

from __future__ import annotations

import hashlib
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo
from processes.ports import free_port, free_ports
from processes.programs import Program, clean_environment, launcher, program, run
from unisono.cluster import Address
from unisono.cluster.elastic.doors import may_answer

# Trains 24 steps. What happens to whom at which step is the argument.
SCRIPT = """
import hashlib, os, signal, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import unisono as uo

def tell(*words):
    # Workers of torchrun share a pipe and write without a buffer, so a line must be one write.
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

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
tell("from step", handler.total_run_calls)
members = strategy.extended.elastic.members
wanted = 0
while handler.total_run_calls < 24:
    for (x,) in batches:
        what = fate.get(str(handler.total_run_calls))
        if what == "let in":
            tell("waiting")
            wanted = len(members.met.members) + 1
        if len(members.met.members) < wanted:
            # One that comes late to a meeting is let in at the next one.
            wait_for(members.newcomers)
        if what == "be lost":
            tell("training with", len(members.met.members))
            time.sleep(600)
        elif what == "linger":
            # The launchers of the hosts tell each other every five seconds that they live.
            time.sleep(7)
        elif what == "die" and os.environ["RANK"] == "1" and not os.path.exists(folder):
            os.mkdir(folder)
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "hear" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            wait_for(lambda: signals)
        elif what == "end":
            os.kill(os.getppid(), signal.SIGTERM)
            wait_for(lambda: signals)
            time.sleep(1.1)
        handler.run(step, x)
        if handler.total_run_calls == 24:
            break
tell("weights", hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
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
    begin, join = (
        launcher(*options, "--rdzv-conf", f"last_call_timeout=1{more}", script, tmp_path / "folder")
        # Hosts whose names the network does not know say which one has the store.
        for more in ("", ",is_host=0")
    )
    environ = clean_environment(
        UNISONO_JOB_TOKEN="secret", OMP_NUM_THREADS="1", TMPDIR=str(tmp_path)
    )

    with program([*begin, "3=let in", "6=be lost"], environ) as first:
        wait_for_line(first, "waiting")
        with program([*join, "9=let in", "14=end"], environ) as second:
            line = wait_for_line(first, "training with")
            if "training with 2" not in line:
                second.send_signal(signal.SIGTERM)
                raise AssertionError((line, second.communicate(timeout=60)))
            # With the launcher, the host of the first endpoint and its worker are lost.
            first.send_signal(signal.SIGKILL)
            wait_for_line(second, "waiting")
            with program(join, environ) as third:
                output, errors = third.communicate(timeout=200)
            output_of_second, errors_of_second = second.communicate(timeout=200)

    assert third.returncode == 0, (errors, output_of_second, errors_of_second)
    assert undisturbed() in output
    assert re.search(r"from step 1\d", output)
    assert second.returncode == 0, errors_of_second
    assert "Lost worker 0:" in errors_of_second
    assert "Worker 1 left: worker 2 takes over" in errors
    assert not (tmp_path / "folder").exists()


def test_launchers_do_not_say_again_and_again_that_the_first_host_is_lost(
    tmp_path: Path, script: Path
) -> None:
    endpoint = Address("127.0.0.1", free_port())
    options = ["-n", "1", "--elastic", "--nnodes", "2", "--rdzv-endpoint", str(endpoint)]
    command = launcher(*options, script, tmp_path / "folder")
    environ = clean_environment(
        UNISONO_JOB_TOKEN="secret", OMP_NUM_THREADS="1", TMPDIR=str(tmp_path)
    )
    with program([*command, "6=be lost"], environ) as first:
        deadline = time.monotonic() + 60
        # The launcher that listens there has come first.
        while not may_answer(endpoint.host, endpoint.port) and time.monotonic() < deadline:
            time.sleep(0.05)
        with program([*command, "7=linger"], environ) as second:
            wait_for_line(first, "training with 2")
            first.send_signal(signal.SIGKILL)
            output, errors = second.communicate(timeout=200)

    assert undisturbed() in output
    assert "Lost worker" in errors
    assert "rendezvous" not in errors


def test_torchrun_restarts_all_workers_after_a_loss_and_no_step_is_lost(
    tmp_path: Path, script: Path
) -> None:
    folder = tmp_path / "folder"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "--max-restarts=1", str(script), str(folder), "7=die"]
    # It would end first where torchrun is slow.
    command.append("12=hear")

    status, output, errors = run(command, clean_environment(OMP_NUM_THREADS="1"))

    assert status == 0, errors
    # The other worker has gone on with all replicas until torchrun ended it, and has saved.
    steps = [int(step) for step in re.findall(r"from step (\d+)", output)]
    assert steps[0] == 0
    assert steps[-1] >= 8
    assert undisturbed() in output
