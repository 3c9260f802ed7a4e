"""R replicas on batch B/R end with the weights of one device on batch B."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo
from unisono.testing import separate_memories

Build = Callable[[], nn.Module]
BATCH = 12


class Embedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.table((x.abs() * 5).long().clamp(max=19).flatten(1))
        return rows.mean(dim=1)[:, :4]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        encoded: Tensor = self.head(self.encoder(x.flatten(1)[:, :40].reshape(-1, 5, 8)).mean(1))
        return encoded


MODELS: dict[str, Build] = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, 4)),
    "convnet": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)
    ),
    "embedding": Embedder,
    "transformer": Transformer,
}

Make = Callable[[Any], torch.optim.Optimizer]
_MAKE: dict[str, Make] = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01, eps=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01, eps=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-3),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.01, eps=1e-3),
}
# torch before 2.9 has no Muon.
OPTIMIZERS = {name: make for name, make in _MAKE.items() if hasattr(torch.optim, name)}
# Orthogonalises in bfloat16, which turns the last bit of a sum into the third digit.
ROUGH = {"Muon": 1e-3}


@functools.cache
def data(num_samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(num_samples, 3, 4, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 4, (num_samples,), generator=generator)


def trained(
    build: Build,
    make: Make,
    num_replicas: int,
    *,
    num_samples: int = 2 * BATCH,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> dict[str, Tensor]:
    """Trains for two epochs, and returns the state of the model."""
    torch.manual_seed(1)
    strategy = uo.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)], **options)
    with strategy.scope():
        model = build().to(dtype)
        optimizer = make(model.parameters())
    x, y = data(num_samples)
    loader = DataLoader(TensorDataset(x.to(dtype), y), batch_size=BATCH)

    def step(x: Tensor, y: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()

    for _ in range(2):
        for batch in strategy.experimental_distribute_dataset(loader):
            strategy.run(step, args=batch)
    strategy.close()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        message = f"{name} differs by {(found[name] - tensor).abs().max()}"
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance, msg=message)


def optimizer_of(model: str) -> Make:
    return OPTIMIZERS["SparseAdam" if model == "embedding" else "Adam"]


def trained_model(model: str, num_replicas: int, **more: Any) -> dict[str, Tensor]:
    is_normalised = model == "convnet"
    make = optimizer_of(model)
    return trained(MODELS[model], make, num_replicas, synchronize_batch_norm=is_normalised, **more)


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("model", MODELS)
def test_every_model(model: str, num_replicas: int, memories: str) -> None:
    found = trained_model(model, num_replicas)

    assert_same(found, plainly_trained(model, 2 * BATCH), 1e-12)


# 53 samples in batches of 12 leave 5, which no number of replicas here divides; 49 leave 1, so that
# all replicas but one get none.
@pytest.mark.parametrize("num_samples", [53, 49])
@pytest.mark.parametrize("num_replicas", [2, 3, 4])
@pytest.mark.parametrize("model", MODELS)
def test_uneven_and_empty_batches(
    model: str, num_replicas: int, num_samples: int, memories: str
) -> None:
    found = trained_model(model, num_replicas, num_samples=num_samples)

    assert_same(found, plainly_trained(model, num_samples), 1e-12)


@functools.cache
def plainly_trained(model: str, num_samples: int) -> dict[str, Tensor]:
    """Trains with torch alone."""
    torch.manual_seed(1)
    plain = MODELS[model]().double()
    optimizer = optimizer_of(model)(plain.parameters())
    x, y = data(num_samples)
    for _ in range(2):
        for start in range(0, num_samples, BATCH):
            optimizer.zero_grad()
            rows = slice(start, start + BATCH)
            functional.cross_entropy(plain(x[rows]), y[rows]).backward()
            optimizer.step()
    return {name: tensor.clone() for name, tensor in plain.state_dict().items()}


def test_every_optimizer_of_torch_is_here() -> None:
    named = {name: getattr(torch.optim, name) for name in torch.optim.__all__}
    optimizers = {
        name
        for name, thing in named.items()
        if isinstance(thing, type) and thing is not torch.optim.Optimizer
    }

    assert optimizers == set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, memories: str) -> None:
    models = {
        "Muon": lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 8, bias=False), nn.Tanh()),
        "SparseAdam": MODELS["embedding"],
    }
    build = models.get(name, MODELS["mlp"])
    expected = trained(build, OPTIMIZERS[name], 1)

    for num_replicas in (2, 3, 4):
        found = trained(build, OPTIMIZERS[name], num_replicas)
        assert_same(found, expected, ROUGH.get(name, 1e-12))


@pytest.mark.parametrize("model", MODELS)
def test_single_precision_is_close(model: str) -> None:
    expected = trained_model(model, 1, dtype=torch.float32)

    for num_replicas in (2, 3):
        found = trained_model(model, num_replicas, dtype=torch.float32)
        assert_same(found, expected, 1e-5)


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_two_runs_agree_to_the_bit(model: str, num_replicas: int) -> None:
    first, second, third = (
        trained_model(model, num_replicas, num_samples=53, dtype=torch.float32) for _ in range(3)
    )

    assert_same(second, first, 0.0)
    assert_same(third, first, 0.0)


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_separate_memories_give_the_same_bits(model: str, num_replicas: int) -> None:
    states = []
    for memories in (nullcontext, separate_memories):
        with memories():
            states.append(trained_model(model, num_replicas, dtype=torch.float32))

    assert_same(states[0], states[1], 0.0)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_sum_of_losses_that_are_divided_by_the_global_batch(num_replicas: int) -> None:
    """The rule of `tf.distribute`: divide by the global batch size, and sum the gradients."""
    x, y = data(53)
    strategy = uo.MirroredStrategy(
        [f"cpu:{i}" for i in range(num_replicas)], reduce_gradients=uo.ReduceOp.SUM
    )
    torch.manual_seed(1)
    with strategy.scope():
        model = MODELS["mlp"]().double()
        optimizer = OPTIMIZERS["SGD"](model.parameters())
    torch.manual_seed(1)
    reference = MODELS["mlp"]().double()
    plain = OPTIMIZERS["SGD"](reference.parameters())

    def step(x: Tensor, y: Tensor, size: int) -> None:
        optimizer.zero_grad()
        (functional.cross_entropy(model(x), y, reduction="sum") / size).backward()
        optimizer.step()

    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH)
    sizes = [12, 12, 12, 12, 5]
    batches = strategy.experimental_distribute_dataset(loader)
    for (own_x, own_y), (all_x, all_y), size in zip(batches, loader, sizes, strict=True):
        strategy.run(step, args=(own_x, own_y, size))
        plain.zero_grad()
        functional.cross_entropy(reference(all_x), all_y).backward()
        plain.step()
    strategy.close()

    assert_same(model.state_dict(), reference.state_dict(), 1e-12)
