"""`torch.compile` of the model, of the step, and of both."""

import copy
import importlib
import threading
from collections import Counter
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


def counting(graphs: list[int]) -> Callable[..., Any]:
    def backend(graph: Any, _: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    return backend


@pytest.mark.parametrize("what", ["model", "in place", "step"])
def test_one_compilation_serves_all_replicas(mirrored: Make, what: str) -> None:
    found = []
    for num_replicas in (2, 3):
        torch.compiler.reset()
        strategy = mirrored(num_replicas)
        with strategy.scope():
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        graphs: list[int] = []
        used: Any = model
        if what == "model":
            used = torch.compile(model, backend=counting(graphs))
        elif what == "in place":
            model.compile(backend=counting(graphs))

        def step(x: Tensor, used: Any = used, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            used(x).mean().backward()
            optimizer.step()

        run: Any = torch.compile(step, backend=counting(graphs)) if what == "step" else step
        for _ in range(4):
            parts = torch.randn(4 * num_replicas, 3).chunk(num_replicas)
            strategy.run(run, args=(uo.PerReplica(parts),))
        found.append(graphs)

    # A step is cut into parts where replicas meet.
    assert found[0] == found[1]
    assert found[0] if what == "step" else len(found[0]) == 1


class Deep(nn.Module):
    """Calls a compiled function that lies behind several others."""

    def forward(self, x: Tensor) -> Tensor:
        return fourth(x)


def fourth(x: Tensor) -> Tensor:
    return third(x)


def third(x: Tensor) -> Tensor:
    return second(x)


def second(x: Tensor) -> Tensor:
    return first(x)


def first(x: Tensor) -> Tensor:
    output: Tensor = innermost(x)
    return output


innermost: Any = None


@pytest.mark.parametrize("is_module", [False, True])
def test_what_is_compiled_far_below_is_compiled_once(
    mirrored: Make, monkeypatch: pytest.MonkeyPatch, is_module: bool
) -> None:
    strategy, graphs = mirrored(3), list[int]()
    compiled = torch.compile(lambda x: (x + 1).sin(), backend=counting(graphs))
    monkeypatch.setitem(globals(), "innermost", compiled)
    with strategy.scope():
        model = Deep()

    def step(x: Tensor) -> Tensor:
        return model(x) if is_module else fourth(x)

    for _ in range(3):
        strategy.run(step, args=(uo.PerReplica(torch.ones(6).chunk(3)),))

    assert len(graphs) == 1


@pytest.mark.parametrize("step", [threading.get_ident, Counter(a=1).copy, Counter])
def test_a_step_need_not_be_a_function(mirrored: Make, step: Callable[[], Any]) -> None:
    # The compiler is loaded, so that the strategy looks for what it may compile.
    importlib.import_module("torch._dynamo.convert_frame")

    mirrored(2).run(step)


def test_another_shape_is_compiled_once(mirrored: Make) -> None:
    strategy, graphs = mirrored(3), list[int]()
    compiled = torch.compile(lambda x: (x + 1).sin(), backend=counting(graphs), dynamic=False)

    def step(x: Tensor) -> None:
        compiled(x)

    for rows in (6, 6, 6, 9, 9, 12, 6):
        strategy.run(step, args=(uo.PerReplica(torch.ones(rows).chunk(3)),))

    assert len(graphs) == 3


def test_what_a_compiled_model_draws_is_the_replicas_own(mirrored: Make) -> None:
    strategy = mirrored()
    compiled = torch.compile(lambda x: nn.functional.dropout(x), backend="aot_eager")

    def drawn() -> tuple[Any, ...]:
        torch.manual_seed(5)
        step = lambda: compiled(torch.ones(50)).tolist()  # noqa: E731
        return strategy.experimental_local_results(strategy.run(step))

    first = drawn()

    assert first[0] != first[1]
    assert [drawn() for _ in range(5)] == [first] * 5


def test_batch_normalisation_is_still_one_graph_outside(mirrored: Make) -> None:
    mirrored().run(lambda: None)
    graphs: list[int] = []
    compiled = torch.compile(nn.BatchNorm1d(2), backend=counting(graphs), fullgraph=True)

    compiled(torch.randn(4, 2))

    assert len(graphs) == 1
    torch.jit.script(nn.BatchNorm1d(2))
