"""Training in a notebook, under Ctrl-C, next to another job, and under a debugger.

Each test runs its own program, because it is about a process as a whole.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

NOTEBOOK = {
    "nbformat": 4,
    "cells": [
        {"cell_type": "markdown", "source": ["# Training\n"]},
        {
            "cell_type": "code",
            "source": [
                "import threading\n",
                "import torch\n",
                "import unisono as uo\n",
                "# Other use of threads before: autograd's, torch's own, and Python's.\n",
                "(torch.randn(300, 300, requires_grad=True) @ torch.randn(300, 300)).sum()"
                ".backward()\n",
                "other = threading.Thread(target=torch.randn, args=(100, 100))\n",
                "other.start()\n",
                "other.join()\n",
            ],
        },
        {
            "cell_type": "code",
            "source": [
                "strategy = uo.MirroredStrategy(['cpu:0', 'cpu:1'])\n",
                "torch.manual_seed(0)\n",
                "with strategy.scope():\n",
                "    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(),\n",
                "                                torch.nn.Linear(8, 1))\n",
                "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
                "\n",
                "def step(x):\n",
                "    optimizer.zero_grad()\n",
                "    loss = (model(x) - 1).square().mean()\n",
                "    loss.backward()\n",
                "    optimizer.step()\n",
                "    return loss.detach()\n",
                "\n",
                "loader = torch.utils.data.DataLoader(torch.ones(40, 4), batch_size=8)\n",
                "for x in strategy.experimental_distribute_dataset(loader):\n",
                "    loss = strategy.reduce('MEAN', strategy.run(step, args=(x,)))\n",
                "losses = globals().setdefault('losses', [])\n",
                "losses.append(loss.item())\n",
            ],
        },
        {
            "cell_type": "code",
            "source": [
                "try:\n",
                "    strategy.run(lambda: 1 / 0)\n",
                "except ZeroDivisionError:\n",
                "    print('an error in a cell')\n",
            ],
        },
        {
            "cell_type": "code",
            "source": [
                "import gc, time\n",
                "gc.collect()\n",
                "def replica_threads():\n",
                "    return [t for t in threading.enumerate() if 'unisono' in t.name]\n",
                "deadline = time.monotonic() + 60\n",
                "while len(replica_threads()) > 1 and time.monotonic() < deadline:\n",
                "    time.sleep(0.01)\n",
                "threads = replica_threads()\n",
                "print('threads', len(threads), 'same', len(set(losses)) == 1, len(losses))\n",
            ],
        },
    ],
}

# Runs the cells of a notebook as a kernel does: each in one namespace, going on after an error.
RUNNER = """
import json, sys, traceback
notebook = json.load(open(sys.argv[1]))
cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
namespace = {"__name__": "__main__"}
for number in json.loads(sys.argv[2]):
    source = "".join(cells[number]["source"])
    try:
        exec(compile(source, f"<cell {number}>", "exec"), namespace)
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
"""

TRAINING = """
import torch, unisono as uo
strategy = uo.MirroredStrategy(["cpu:0", "cpu:1"])
torch.manual_seed(0)
with strategy.scope():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def step(x):
    optimizer.zero_grad()
    loss = (model(x) - 1).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

def train(num_steps):
    for number in range(num_steps):
        strategy.run(step, args=(uo.PerReplica(torch.ones(8, 4).chunk(2)),))
        if number == 0:
            print("training", flush=True)
    print("end", model.weight.sum().item(), flush=True)
"""


def start(*arguments: str, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def end(process: "subprocess.Popen[str]", text: str = "") -> tuple[str, str]:
    """Waits for a program to end, and asserts that it leaves no process behind."""
    try:
        output, errors = process.communicate(text, timeout=200)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    return output, errors


@pytest.fixture(autouse=True)
def nothing_is_left_in_temporary_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    yield
    monkeypatch.undo()
    # torch makes the folder of its compiler when it is imported.
    assert [path.name for path in folder.iterdir() if "inductor" not in path.name] == []


def test_cells_of_a_notebook_can_be_run_again(tmp_path: Path) -> None:
    notebook = tmp_path / "training.ipynb"
    notebook.write_text(json.dumps(NOTEBOOK))
    order = [0, 1, 1, 2, 1, 0, 1, 2, 3]

    process = start("-c", RUNNER, str(notebook), json.dumps(order))
    output, errors = end(process)

    assert process.returncode == 0, errors
    # The strategies of cells that were run again are gone, and their threads with them.
    assert output.splitlines()[-1] in ("threads 1 same True 4", "threads 0 same True 4")
    assert errors == ""


@pytest.mark.parametrize("is_serial", ["0", "1"])
def test_ctrl_c_ends_a_training_script(is_serial: str) -> None:
    process = start("-c", TRAINING + "train(10**9)", UNISONO_SERIAL=is_serial)
    assert process.stdout is not None
    assert process.stdout.readline() == "training\n"

    # It would train for days otherwise.
    process.send_signal(signal.SIGINT)
    output, errors = end(process)

    assert process.returncode in (1, 130, -signal.SIGINT)
    assert errors.rstrip().splitlines()[-1].startswith("KeyboardInterrupt")
    assert "end" not in output


def test_scripts_on_one_host_do_not_collide_and_end_without_being_told_to() -> None:
    jobs = [start("-c", TRAINING + "train(200)") for _ in range(2)]

    outputs = [end(job) for job in jobs]

    assert [job.returncode for job in jobs] == [0, 0], outputs
    assert outputs[0] == outputs[1]
    output, errors = outputs[0]
    assert output.startswith("training\nend")
    assert errors == ""


def test_a_debugger_stands_in_a_replica() -> None:
    program = TRAINING.replace(
        "    optimizer.step()\n", "    optimizer.step()\n    breakpoint()\n"
    ).replace('"cpu:1"]', '"cpu:1"], serial=True')

    process = start("-c", program + "train(1)")
    output, errors = end(
        process,
        "p ('id', uo.get_replica_context().replica_id_in_sync_group)\n"
        "p ('shape', x.shape)\n"
        "continue\n"
        "p ('id', uo.get_replica_context().replica_id_in_sync_group)\n"
        "continue\n",
    )

    assert process.returncode == 0, errors
    assert output.index("('id', 0)") < output.index("('shape', torch.Size([4, 4]))")
    assert output.index("('shape'") < output.index("('id', 1)") < output.index("end")
