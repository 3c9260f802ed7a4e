"""Trainers of other projects over the backend: every program in examples/torch_backend runs."""

from __future__ import annotations

import ast
import os
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import Store

from processes.harness import run_ranks
from processes.programs import clean_environment, run
from unisono_tools.processes import free_ports

pytestmark = pytest.mark.backend

EXAMPLES = Path(__file__).parents[2] / "examples" / "torch_backend"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


def loss_of_one_process() -> float:
    """What the examples do, in one process that sees the whole batch."""
    torch.manual_seed(0)
    inputs = torch.randn(16, 4)
    labels = inputs.sum(1, keepdim=True)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), labels).backward()
        optimizer.step()
    return nn.functional.mse_loss(model(inputs), labels).item()


def check_program(*command: str | Path, **variables: str) -> None:
    """The program says that it trained over Unisono, to the loss of one process."""
    environ = clean_environment(OMP_NUM_THREADS="1", **variables)

    status, output, errors = run(command, environ)

    assert status == 0, errors
    found = re.search(r"^unisono: loss (\S+)$", output, re.MULTILINE)
    assert found is not None, output + errors
    assert float(found[1]) == pytest.approx(loss_of_one_process(), abs=2e-6)


def run_examples(
    store: Store, rank: int, size: int, names: list[str], ports: list[int]
) -> list[float]:
    """Calls `main` of each example in a process that looks like one that torchrun has started."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        OMP_NUM_THREADS="1",
    )
    losses = []
    for name, port in zip(names, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        losses.append(runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]())
    return losses


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_the_first_lines_say_how_to_run_it(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""

    assert f" examples/torch_backend/{path.name}" in docstring


def test_torchrun() -> None:
    check_program(*TORCHRUN, EXAMPLES / "with_torchrun.py")


@needs("accelerate", "transformers")
def test_accelerate_and_the_trainer_of_hugging_face() -> None:
    names = ["with_accelerate", "with_hf_trainer"]

    for accelerate, trainer in run_ranks(2, run_examples, names, free_ports(2), timeout=200):
        assert accelerate == pytest.approx(loss_of_one_process(), rel=1e-5)
        # A model that has learnt nothing has a loss of 3.2, the logarithm of 24.
        assert trainer < 2.5


@needs("lightning")
@pytest.mark.parametrize("name", ["with_lightning", "with_fabric"])
def test_lightning(name: str) -> None:
    check_program(sys.executable, EXAMPLES / f"{name}.py")


@needs("ray", "pandas", "pyarrow")
def test_ray_train(tmp_path: Path) -> None:
    # Ray writes a token into the home folder.
    check_program(sys.executable, EXAMPLES / "with_ray_train.py", HOME=str(tmp_path))
