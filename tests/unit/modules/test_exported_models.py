"""Models that are saved, scripted, traced and quantized as plain ones are."""

from __future__ import annotations

import copy
import importlib
import io
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import unisono as uo

Make = Callable[..., uo.MirroredStrategy]

LOADS = """
    import sys, torch
    sys.modules["unisono"] = None
    from torch import nn
    model, optimizer = torch.load(sys.argv[1], weights_only=False)
    assert type(model[0]) is nn.Linear and type(optimizer) is torch.optim.SGD
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.BatchNorm1d]):
        assert type(torch.load(sys.argv[2], weights_only=True)[0]) is nn.Linear
"""


def test_what_is_saved_whole_loads_without_unisono(mirrored: Make, tmp_path: Path) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 2)).square().sum().backward()
        optimizer.step()

    strategy.run(step)

    torch.save([model, optimizer], tmp_path / "both.pt")
    torch.save(model, tmp_path / "model.pt")
    files = [str(tmp_path / name) for name in ("both.pt", "model.pt")]
    command = [sys.executable, "-c", textwrap.dedent(LOADS), *files]
    loaded = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert loaded.returncode == 0, loaded.stderr


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_model_is_scripted_as_a_plain_one_and_goes_on_training(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    strategy.run(lambda: model(torch.ones(1, 2)))

    scripted = torch.jit.script(model)

    assert torch.equal(scripted(torch.ones(1, 2)), model(torch.ones(1, 2)))
    strategy.run(lambda: (model(torch.ones(1, 2)).sum().backward(), optimizer.step()))
    assert torch.equal(scripted(torch.ones(1, 2)), model(torch.ones(1, 2)))
    with pytest.raises(RuntimeError, match="Call the model itself"):
        mirrored_step(strategy, scripted)
    file = io.BytesIO()
    torch.jit.save(scripted, file)


def mirrored_step(strategy: uo.Strategy, model: Any) -> None:
    strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())


def test_fx_traces_a_model_as_a_plain_one(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    strategy.run(lambda: model(torch.ones(1, 2)))

    graph = fx.symbolic_trace(model)

    assert [node.op for node in graph.graph.nodes] == [
        "placeholder",
        "call_module",
        "call_module",
        "output",
    ]


@pytest.mark.filterwarnings("ignore")
def test_quantization_aware_training(mirrored: Make) -> None:
    # Typed as anything, like what it makes of a model.
    quantization: Any = importlib.import_module("torch.ao.quantization")
    strategy = mirrored()
    with strategy.scope():
        model: Any = nn.Sequential(
            quantization.QuantStub(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)
        )
    strategy.run(lambda: model(torch.ones(2, 4)))
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    quantization.prepare_qat(model.train(), inplace=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[1].weight.detach().clone()

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(3):
        strategy.run(step, args=(uo.PerReplica(torch.randn(8, 4).chunk(2)),))

    assert type(model[1]).__module__.startswith("torch.ao.nn.qat")
    assert not torch.equal(model[1].weight, before)
    # The observers have seen the weights of each channel, and what the model was given.
    observed = model[1].weight_fake_quant.activation_post_process
    torch.testing.assert_close(observed.max_val, model[1].weight.amax(dim=1), rtol=0.2, atol=0.05)
    assert model[0].activation_post_process.scale.item() != 1
    converted = quantization.convert(copy.deepcopy(model).eval())
    assert type(converted[1]).__module__.startswith("torch.ao.nn.quantized")
