"""Programs that were written from the documentation alone run, and give what one device gives."""

from __future__ import annotations

import importlib
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from processes.programs import clean_environment, launcher, run
from torch import Tensor, nn
from torch.utils.data import DataLoader

import unisono as uo
from newcomer import two_workers
from newcomer.clipping import ClippedMean
from unisono_tools.processes import one_thread

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def one_thread_per_replica() -> Any:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def cnn() -> Any:
    """The program, which needs torchmetrics."""
    pytest.importorskip("torchmetrics")
    return importlib.import_module("newcomer.cnn")


def train_cnn(cnn: Any, folder: Path, *arguments: object) -> Any:
    words = ("--replicas", 2, "--folder", folder, *arguments)
    return cnn.main([str(word) for word in words])


def test_the_cnn_learns_and_its_metrics_are_those_of_the_plain_model(
    cnn: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cnn")

    training = train_cnn(cnn, tmp_path, "--epochs", 4)

    # The checkpoint loads into a plain model, without a strategy.
    plain = cnn.Net()
    plain.load_state_dict(torch.load(tmp_path / "last.pt")["model"])
    plain.eval()
    images, labels = cnn.made_images(50, seed=2).tensors
    with torch.no_grad():
        scores = plain(images)
    last = training.history[-1]
    assert last["accuracy"] == pytest.approx((scores.argmax(1) == labels).float().mean().item())
    assert last["loss"] == pytest.approx(nn.functional.cross_entropy(scores, labels).item())
    assert last["accuracy"] > 0.8
    assert last["lr"] == pytest.approx(1e-2 * 0.9**4)
    # One line per epoch, although two replicas train.
    assert [json.loads(one.message)["epoch"] for one in caplog.records] == [1, 2, 3, 4]


def test_the_cnn_resumes_with_the_same_bits(cnn: Any, tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()

    whole = train_cnn(cnn, tmp_path / "whole", "--epochs", 3)
    train_cnn(cnn, tmp_path / "parts", "--epochs", 1)
    parts = train_cnn(cnn, tmp_path / "parts", "--epochs", 3)

    assert parts.history == whole.history
    expected = whole.model.state_dict()
    for name, value in parts.model.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_the_cnn_stops_early(cnn: Any, tmp_path: Path) -> None:
    training = train_cnn(cnn, tmp_path, "--epochs", 100, "--patience", 1)

    losses = [epoch["loss"] for epoch in training.history]
    # The last epoch alone was no better than the best one before it.
    assert len(losses) < 100
    assert losses[-1] >= min(losses[:-1])
    assert torch.load(tmp_path / "best.pt")["best_loss"] == min(losses)


def test_two_processes_count_every_sample_once() -> None:
    program = HERE / "two_workers.py"
    environ = clean_environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")

    status, output, errors = run(launcher("-n", "2", program), environ)

    assert status == 0, errors
    found = [json.loads(text) for text in re.findall(r"FOUND (.*)", output)]
    expected = one_device()
    assert len(found) == 2
    for worker in found:
        assert (worker["replicas"], worker["seen"]) == (2, 3 * 45)
        assert worker["accuracy"] == pytest.approx(expected["accuracy"])
        assert worker["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        torch.testing.assert_close(torch.tensor(worker["weight"]), expected["weight"])
    assert found[0] == found[1]


def one_device() -> dict[str, Any]:
    """The program of two workers, in plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss_sum, right, seen = 0.0, 0, 0
    for _ in range(3):
        for x, y in DataLoader(two_workers.data(), batch_size=8):
            optimizer.zero_grad()
            scores = model(x)
            loss = nn.functional.cross_entropy(scores, y)
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(x)
            right += int((scores.argmax(1) == y).sum())
            seen += len(x)
    return {"loss": loss_sum / seen, "accuracy": right / seen, "weight": model.weight.detach()}


def test_a_reduction_clips_the_gradients_of_each_replica() -> None:
    ops = ClippedMean(max_norm=1.0)
    strategy = uo.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"], cross_device_ops=ops)
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [weight.detach().clone() for weight in model.parameters()]
    # The samples of the last replica are far too large.
    inputs = torch.randn(6, 4)
    targets = torch.tensor([0.1, 0.2, 0.3, 0.4, 900.0, 1000.0]).unsqueeze(1)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

    ((x, y),) = strategy.experimental_distribute_dataset([(inputs, targets)])
    strategy.run(step, args=(x, y))
    strategy.close()

    expected = [torch.zeros_like(weight) for weight in before]
    norms = []
    for part, target in zip(inputs.split(2), targets.split(2), strict=True):
        parameters = dict(zip(("0.weight", "0.bias", "2.weight", "2.bias"), before, strict=True))
        for weight in parameters.values():
            weight.requires_grad_()
        output = torch.func.functional_call(model, parameters, (part,))
        gradients = torch.autograd.grad(
            nn.functional.mse_loss(output, target), list(parameters.values())
        )
        norms.append(torch.cat([one.flatten() for one in gradients]).norm().item())
        for total, gradient in zip(expected, gradients, strict=True):
            total += gradient * min(1.0, 1.0 / norms[-1]) / 3
    assert norms[2] > 100
    assert ops.norms == pytest.approx(norms, rel=1e-4)
    for weight, old, gradient in zip(model.parameters(), before, expected, strict=True):
        torch.testing.assert_close(weight, old - 0.1 * gradient, rtol=1e-4, atol=1e-6)
