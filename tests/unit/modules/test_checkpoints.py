"""What was saved in the middle of training goes on as if nothing had been."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo

Make = Callable[..., uo.MirroredStrategy]


class Training:
    """A model with dropout and batch normalization, trained by Adam on shuffled data."""

    def __init__(self, strategy: uo.Strategy, seed: int) -> None:
        torch.manual_seed(seed)
        self.strategy = strategy
        with strategy.scope():
            self.model = nn.Sequential(
                nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.ReLU(), nn.Linear(8, 2)
            )
            self.optimizer = torch.optim.Adam(self.model.parameters())
            self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(40, 3, generator=generator), torch.arange(40) % 2
        loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
        self.dataset = strategy.experimental_distribute_dataset(loader)
        self.batches: Any = iter(self.dataset)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.scheduler.step()

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.strategy.run(self.step, args=next(self.batches))

    def save(self) -> bytes:
        file = io.BytesIO()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": {"last_epoch": self.scheduler.last_epoch},
            "random": torch.get_rng_state(),
            "dataset": self.dataset.state_dict(),
        }
        torch.save(state, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        state = torch.load(io.BytesIO(saved), weights_only=False)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.dataset.load_state_dict(state["dataset"])
        self.batches = iter(self.dataset)
        torch.set_rng_state(state["random"])


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_resuming_gives_the_bits_of_not_stopping(
    mirrored: Make, memories: str, num_replicas: int
) -> None:
    whole = Training(mirrored(num_replicas), seed=1)
    whole.train(2)
    saved = whole.save()
    whole.train(3)
    resumed = Training(mirrored(num_replicas), seed=2)
    resumed.train(1)

    resumed.load(saved)
    resumed.train(3)

    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name


def trained(strategy: uo.Strategy, num_steps: int, saved: Any = None) -> tuple[Any, Any]:
    """Trains a model on the same batches with any number of replicas."""
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Linear(3, 2).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    if saved is not None:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    x = torch.randn(12, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(num_steps):
        strategy.run(step, args=(uo.PerReplica(x.chunk(strategy.num_replicas_in_sync)),))
    return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (4, 2)])
def test_states_load_into_any_number_of_replicas(mirrored: Make, before: int, after: int) -> None:
    expected, _ = trained(mirrored(1), 6)

    saved = trained(mirrored(before), 3)
    found, _ = trained(mirrored(after), 3, saved)

    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)


def test_states_go_to_plain_torch_and_back(mirrored: Make) -> None:
    expected, _ = trained(mirrored(2), 6)
    saved = trained(mirrored(2), 3)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.Adam(model.parameters())

    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    found, _ = trained(mirrored(2), 3, (model.state_dict(), optimizer.state_dict()))

    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)


def test_the_state_of_an_optimizer_has_the_keys_and_shapes_of_plain_torch(mirrored: Make) -> None:
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()

    _, found = trained(mirrored(2), 1)

    def outline(state: Any) -> Any:
        return {i: {k: v.shape for k, v in own.items()} for i, own in state["state"].items()}

    assert outline(found) == outline(optimizer.state_dict())
    assert found["param_groups"] == optimizer.state_dict()["param_groups"]
