"""`torch.compile` of the model, of the step, and of both."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as uo

Make = Callable[..., uo.MirroredStrategy]

# The compiler warns of what it meets on its way: of its own modules, and of any cache.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("what", "backend"),
    [("model", "eager"), ("model", "aot_eager"), ("step", "eager"), ("both", "eager")],
)
def test_what_is_compiled_trains_as_what_is_not(mirrored: Make, what: str, backend: str) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reference = copy.deepcopy(model)
    x = torch.randn(4, 3)

    def compiled(thing: Any, name: str) -> Any:
        return torch.compile(thing, backend=backend) if what in (name, "both") else thing

    used = compiled(model, "model")

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = used(x).sum(dim=1).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = compiled(step, "step")
    losses = [
        strategy.reduce("MEAN", strategy.run(run, args=(uo.PerReplica(x.chunk(2)),)))
        for _ in range(3)
    ]

    plain = torch.optim.SGD(reference.parameters(), lr=1.0)
    for loss in losses:
        plain.zero_grad()
        expected = reference(x).sum(dim=1).mean()
        expected.backward()
        plain.step()
        torch.testing.assert_close(loss, expected.detach())
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.last(torch.tanh(self.first(x)))
        return output


def test_a_model_becomes_one_graph_a_replica(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    compiled = torch.compile(model, backend=backend)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        compiled(x).mean().backward()
        optimizer.step()

    for _ in range(4):
        strategy.run(step, args=(uo.PerReplica(torch.randn(8, 3).chunk(2)),))

    assert set(graphs) == {3}
