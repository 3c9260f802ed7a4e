"""Modules of every kind train on two threads as they do on none."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import unisono as uo

Make = Callable[..., uo.MirroredStrategy]
NUM_STEPS = 50


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 4, bias=False)
        self.output = nn.Linear(4, 4, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.output(torch.tanh(self.embedding(x)))
        return output


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(4, 4) for _ in range(3)])
        self.named = nn.ParameterDict({"scale": torch.randn(4)})
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 4)})

    def forward(self, x: Tensor) -> Tensor:
        for weight, layer in zip(self.weights, [*self.layers, *self.heads.values()], strict=True):
            x = torch.tanh(layer(x @ weight))
        output: Tensor = x * self.named["scale"]
        return output


class Methods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.captured = self.second.forward
        self.listed = [self.first, self.second]

    def encode(self, x: Tensor) -> Tensor:
        encoded: Tensor = self.listed[0](x)
        return torch.tanh(encoded)

    def forward(self, x: Tensor) -> Tensor:
        return self.captured(self.encode(x))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU] | type[nn.RNN]) -> None:
        super().__init__()
        self.layer = kind(4, 4, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x[:, None, :].repeat(1, 3, 1))[0][:, -1]
        return output


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x[:, None, :].repeat(1, 3, 1))[:, 0]
        return output


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.T


def parametrized() -> nn.Module:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.Tanh(), parametrizations.weight_norm(nn.Linear(4, 4)))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)),
    "tied": Tied,
    "lists": Lists,
    "methods": Methods,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN),
    "transformer": Attending,
    "parametrized": parametrized,
    "shared layer": lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2),
}


def batches() -> list[Tensor]:
    return list(torch.randn(NUM_STEPS, 6, 4, dtype=torch.float64))


def plain(model: nn.Module, inputs: list[Tensor]) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trace = []
    for x in inputs:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        trace.append([loss.detach(), *(p.grad for p in model.parameters())])
    return trace


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_losses_and_gradients_are_those_of_one_device(
    mirrored: Make, kind: str, num_replicas: int
) -> None:
    model = KINDS[kind]().double()
    # Parametrized modules can be rebuilt, but not copied.
    reference = KINDS[kind]().double()
    reference.load_state_dict(model.state_dict())
    inputs = batches()
    expected = plain(reference, inputs)
    strategy = mirrored(num_replicas)
    strategy.mirror(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x: Tensor) -> list[Tensor]:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        return [loss.detach(), *gradients]

    for x, wanted in zip(inputs, expected, strict=True):
        parts = uo.PerReplica(x.chunk(num_replicas))
        loss, *gradients = strategy.run(step, args=(parts,))
        found = [strategy.reduce("MEAN", loss), *(g.values[-1] for g in gradients)]
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("use", ["submodule", "method", "forward"])
def test_what_was_captured_before_is_that_of_the_replica(mirrored: Make, use: str) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = Methods()
    first, encode, forward = model.first, model.encode, model.forward
    x = torch.ones(2, 4)

    def step() -> None:
        if use == "submodule":
            first(x).sum().backward()
        elif use == "method":
            encode(x).sum().backward()
        else:
            forward(x).sum().backward()

    def has_gradient() -> bool:
        return model.first.weight.grad is not None

    for _ in range(5):
        strategy.run(step)
        assert strategy.run(has_gradient) is True


def test_a_parameter_captured_before_is_that_of_the_replica(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(2, 2)
    captured = list(model.parameters())

    def step() -> bool:
        model(torch.ones(1, 2)).sum().backward()
        return all(parameter.grad is not None for parameter in captured)

    assert strategy.run(step) is True


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "operator": lambda w, b: (w * 2).sum() + b.sum(),
    "list": lambda w, b: torch.cat([w, b[None]]).sum(),
    "keyword": lambda w, b: nn.functional.linear(torch.ones(1, 2), w, bias=b).sum(),
    "method": lambda w, b: w.sum() + b.sum(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_gradients_of_a_captured_parameter_are_reduced(
    mirrored: Make, use: Callable[[Tensor, Tensor], Tensor]
) -> None:
    strategy = mirrored(3)
    with strategy.scope():
        model = nn.Linear(2, 2)
    weight, bias = model.weight, model.bias
    use(weight, bias).backward()
    assert weight.grad is not None
    expected = weight.grad.tolist()
    model.zero_grad()

    def step() -> list[float]:
        context = uo.get_replica_context()
        assert context is not None
        (use(weight, bias) * context.local_id).backward()
        assert weight.grad is not None
        (alone,) = torch.autograd.grad(use(weight, bias), [weight])
        return [*weight.grad.flatten().tolist(), *alone.flatten().tolist()]

    flat = [number for row in expected for number in row]
    for _ in range(2):
        model.zero_grad()
        for found in strategy.experimental_local_results(strategy.run(step)):
            assert found == flat * 2
        assert weight.grad.tolist() == expected


def test_parameters_have_their_own_class_but_for_captured_ones(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(2, 2)
    weight = model.weight

    def step() -> list[Any]:
        copied, saved = copy.deepcopy(weight), io.BytesIO()
        torch.save(weight, saved)
        saved.seek(0)
        kinds = [type(model.weight), type(copied), type(torch.load(saved)), weight.__class__]
        kinds.append(uo.once(lambda: type(copy.deepcopy(weight))))
        assert isinstance(weight, nn.Parameter)
        assert repr(weight) == repr(model.weight)
        return kinds

    for kinds in strategy.experimental_local_results(strategy.run(step)):
        assert set(kinds) == {nn.Parameter}
    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda: 1 / 0)
    assert type(weight) is nn.Parameter


def test_each_replica_has_leaves_of_its_own_over_one_storage(mirrored: Make) -> None:
    strategy = mirrored(3)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))

    def step() -> list[tuple[int, int, bool]]:
        return [(id(p), p.data_ptr(), p.is_leaf) for p in model.parameters()]

    seen = strategy.experimental_local_results(strategy.run(step))

    for leaves in zip(*seen, strict=True):
        assert len({identity for identity, _, _ in leaves}) == 3
        assert all(is_leaf for _, _, is_leaf in leaves)
    pointers = [[pointer for _, pointer, _ in own] for own in seen]
    assert pointers == [[p.data_ptr() for p in model.parameters()]] * 3


def test_each_replica_has_parameter_tables_of_its_own(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))

    def tables() -> list[int]:
        recurrent: Any = model[1]
        own = [id(m._parameters) for m in model.modules()]
        return [*own, *(id(m._modules) for m in model.modules()), id(recurrent._flat_weights)]

    first, second = strategy.experimental_local_results(strategy.run(tables))

    assert not {*first} & {*second}
    assert not {*first, *second} & {*tables()}


def test_modules_look_as_they_did(mirrored: Make) -> None:
    plain_model = Tied()
    strategy = mirrored()

    model = strategy.mirror(copy.deepcopy(plain_model))

    assert isinstance(model, Tied)
    assert repr(model) == repr(plain_model)
    assert type(model).__name__ == "Tied"
    assert list(model.state_dict()) == list(plain_model.state_dict())
    assert [n for n, _ in model.named_parameters()] == ["embedding.weight"]
    assert all(n.count("unisono") == 0 for n in vars(plain_model))


def test_python_attributes_are_seen_by_replicas(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model: Any = nn.Linear(2, 2)
    strategy.run(lambda: None)

    model.scale = 3

    assert strategy.run(lambda: model.scale) == 3
    del model.scale
    assert strategy.run(lambda: hasattr(model, "scale")) is False


def test_what_replicas_set_is_their_own(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model: Any = nn.Linear(2, 2)

    def step() -> int:
        context = uo.get_replica_context()
        assert context is not None
        model.mark = context.replica_id_in_sync_group
        return int(model.mark)

    assert strategy.run(step).values == (0, 1)
    assert not hasattr(model, "mark")


def test_hooks_of_modules_run_on_every_replica(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(2, 2)
    calls: list[str] = []

    def step() -> None:
        model(torch.ones(1, 2, requires_grad=True)).sum().backward()

    handles = [
        model.register_forward_pre_hook(lambda *_: calls.append("before")),
        model.register_forward_hook(lambda *_: calls.append("after")),
        model.register_full_backward_hook(lambda *_: calls.append("backward")),
    ]
    strategy.run(step)
    for handle in handles:
        handle.remove()
    strategy.run(step)

    assert sorted(calls) == ["after"] * 2 + ["backward"] * 2 + ["before"] * 2


def test_hooks_of_parameters_run_on_every_replica(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(2, 2, bias=False)
    model.weight.register_hook(lambda grad: grad * 10)

    def step() -> Any:
        model(torch.ones(1, 2)).sum().backward()
        return model.weight.grad

    for _ in range(2):
        assert strategy.run(step).values[1].unique().numel() == 1
        assert strategy.run(lambda: model.zero_grad()) is None
    assert strategy.run(step).values[1].tolist() == [[10, 10], [10, 10]]


def test_a_parametrization_can_come_later(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(4, 4)
    strategy.run(lambda: model(torch.ones(1, 4)))

    parametrizations.weight_norm(model)
    strategy.run(lambda: model(torch.ones(1, 4)).sum().backward())

    assert "parametrizations.weight.original0" in model.state_dict()


def test_a_module_can_be_added_later(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2))
    strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())

    model.add_module("later", nn.Linear(2, 2))
    later: Any = model.later

    def step() -> bool:
        model(torch.ones(1, 2)).sum().backward()
        return later.weight.grad is not None

    assert strategy.run(step) is True
