"""The same bits for the same replicas, however they are spread over workers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo
from processes.harness import run_ranks, strategy_of
from processes.ports import free_ports

connect: Any = importlib.import_module("unisono.communicators.connect")

Bits = tuple[str, tuple[int, ...], bytes]
Case = Callable[[uo.Strategy], dict[str, Bits]]


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(144, 3),
    )


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8, sparse=True)
        self.dense = nn.Linear(8, 3)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.dense(self.embedding(words).sum(1))
        return scores


def images(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randn(num_samples, 1, 8, 8, generator=generator)
    return TensorDataset(pixels, torch.randint(3, (num_samples,), generator=generator))


def sentences(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(6)
    words = torch.randint(50, (num_samples, 5), generator=generator)
    return TensorDataset(words, torch.randint(3, (num_samples,), generator=generator))


def train(
    strategy: uo.Strategy,
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], list[torch.optim.Optimizer]],
    dataset: TensorDataset,
    num_passes: int = 2,
) -> dict[str, Bits]:
    with strategy.scope():
        model = make_model()
        optimizers = make_optimizer(model)

    def step(inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        context = uo.get_replica_context()
        assert context is not None
        smallest = context.all_reduce("MIN", inputs.double().mean())
        everything = context.all_gather(labels, axis=0)
        assert len(everything) == context.all_reduce("SUM", torch.tensor(len(labels)))
        return {"loss": loss.detach(), "labels": labels, "smallest": smallest}

    loader = DataLoader(dataset, batch_size=24, shuffle=True)
    batches = strategy.experimental_distribute_dataset(loader)
    losses, labels, smallest = [], [], []
    for _ in range(num_passes):
        for batch in batches:
            results = strategy.run(step, args=batch)
            losses.append(strategy.reduce(uo.ReduceOp.MEAN, results["loss"]))
            labels.append(strategy.gather(results["labels"], 0))
            smallest.append(strategy.reduce("MEAN", results["smallest"]))
    assert len(torch.cat(labels)) == num_passes * len(dataset)
    found = {
        "losses": torch.stack(losses),
        "labels": torch.cat(labels),
        "smallest": torch.stack(smallest),
    } | model.state_dict()
    return {name: bits_of(tensor) for name, tensor in found.items()}


def bits_of(tensor: Tensor) -> Bits:
    return str(tensor.dtype), tuple(tensor.shape), tensor.detach().cpu().numpy().tobytes()


def images_with_momentum(strategy: uo.Strategy) -> dict[str, Bits]:
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]

    return train(strategy, convolutions, make, images(72))


def images_with_an_uneven_rest(strategy: uo.Strategy) -> dict[str, Bits]:
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(model.parameters(), lr=0.01)]

    return train(strategy, convolutions, make, images(71))


def images_with_a_rest_for_two_replicas(strategy: uo.Strategy) -> dict[str, Bits]:
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model.parameters(), lr=0.1)]

    return train(strategy, convolutions, make, images(26))


def words_with_a_rest_for_one_replica(strategy: uo.Strategy) -> dict[str, Bits]:
    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        assert isinstance(model, Words)
        return [
            torch.optim.SGD(model.embedding.parameters(), lr=0.1),
            torch.optim.Adam(model.dense.parameters(), lr=0.01),
        ]

    return train(strategy, Words, make, sentences(49))


CASES: list[Case] = [
    images_with_momentum,
    images_with_an_uneven_rest,
    images_with_a_rest_for_two_replicas,
    words_with_a_rest_for_one_replica,
]


class Layout(NamedTuple):
    """Where the replicas are."""

    hosts: int
    workers: int
    replicas: int

    @property
    def num_replicas(self) -> int:
        return self.hosts * self.workers * self.replicas

    def __str__(self) -> str:
        return f"{self.hosts} hosts x {self.workers} workers x {self.replicas} replicas"


def train_all(
    store: Store, rank: int, size: int, layout: Layout, ports: list[int]
) -> dict[str, dict[str, Bits]]:
    # What workers draw of their own accord must not matter.
    torch.manual_seed(rank)
    # Workers that take each other for strangers share no memory.
    connect.host_identity = lambda: f"host {rank // layout.workers}"
    strategy = strategy_of(rank, ports, layout.replicas)
    try:
        return {case.__name__: case(strategy) for case in CASES}
    finally:
        strategy.close()


def trained(layout: Layout) -> list[dict[str, dict[str, Bits]]]:
    """What all cases give on each worker of a layout."""
    num_workers = layout.hosts * layout.workers
    return run_ranks(num_workers, train_all, layout, free_ports(num_workers), timeout=200)


LAYOUTS = [
    Layout(1, 4, 1),
    Layout(1, 2, 2),
    Layout(2, 2, 1),
    Layout(2, 1, 2),
    Layout(1, 6, 1),
    Layout(1, 3, 2),
    Layout(1, 2, 3),
    Layout(3, 2, 1),
]


@pytest.mark.parametrize("num_replicas", [4, 6])
def test_training_gives_the_bits_of_one_worker(num_replicas: int) -> None:
    (alone,) = trained(Layout(1, 1, num_replicas))

    for layout in [one for one in LAYOUTS if one.num_replicas == num_replicas]:
        for rank, found in enumerate(trained(layout)):
            differing = [
                (case, name)
                for case, expected in alone.items()
                for name in expected
                if found[case][name] != expected[name]
            ]
            assert not differing, f"worker {rank} of {layout}"


def test_other_replicas_give_other_bits_and_losses_are_numbers() -> None:
    """So that what is compared is not the same whatever happens."""
    (four,), (six,) = trained(Layout(1, 1, 4)), trained(Layout(1, 1, 6))

    assert [four[case.__name__] == six[case.__name__] for case in CASES] == [False] * len(CASES)
    for case in CASES:
        _, _, data = four[case.__name__]["losses"]
        losses = torch.frombuffer(bytearray(data), dtype=torch.float32)
        assert losses.isfinite().all()
