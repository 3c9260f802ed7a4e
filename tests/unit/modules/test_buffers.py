"""What replicas write to buffers becomes one state for all at the end of every run."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from worker_threads import communicator_of, on_strategies

import unisono as uo
from unisono.errors import ReplicaMismatchError, UnequalCollectivesError
from unit.variables.made import number, replica_id

Make = Callable[..., uo.MirroredStrategy]


class Holder(nn.Module):
    """Has one buffer, and does to it what a test says."""

    def __init__(self, buffer: Tensor | None, write: Callable[[Any], None]) -> None:
        super().__init__()
        self.register_buffer("buffer", buffer)
        self.write = write

    def forward(self) -> None:
        self.write(self)


def held(
    strategy: uo.Strategy, buffer: Tensor | None, write: Callable[[Any], None], num_runs: int = 2
) -> Any:
    """Returns a module after its replicas have written to its buffer."""
    with strategy.scope():
        module = Holder(buffer, write)
    for _ in range(num_runs):
        strategy.run(module)
    return module


def add(module: Any) -> None:
    module.buffer.add_(number().to(module.buffer.dtype))


def add_through_data(module: Any) -> None:
    module.buffer.data.add_(number())


def replace(module: Any) -> None:
    module.buffer = module.buffer + number()


def replace_data(module: Any) -> None:
    module.buffer.data = module.buffer + number()


WRITES = [add, add_through_data, replace, replace_data]


@pytest.mark.parametrize("write", WRITES)
def test_floats_are_the_mean_of_all_replicas(
    mirrored: Make, memories: str, write: Callable[[Any], None]
) -> None:
    module = held(mirrored(3), torch.zeros(4), write)

    assert module.buffer.tolist() == [4, 4, 4, 4]
    assert module.state_dict()["buffer"].tolist() == [4, 4, 4, 4]


def test_others_are_those_of_replica_0(mirrored: Make) -> None:
    module = held(mirrored(3), torch.zeros(2, dtype=torch.int64), add)

    assert module.buffer.tolist() == [2, 2]


@pytest.mark.parametrize("shape", [(5,), (1 << 15,), (200, 200)], ids=str)
@pytest.mark.parametrize("write", [add, replace, replace_data])
def test_large_buffers_too(
    mirrored: Make, shape: tuple[int, ...], write: Callable[[Any], None]
) -> None:
    module = held(mirrored(2), torch.zeros(shape), write)

    assert module.buffer.shape == shape
    assert module.buffer.unique().tolist() == [3]


def test_writes_that_torch_does_not_count(mirrored: Make) -> None:
    class Normed(nn.Module):
        mean: Tensor
        variance: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(1))
            self.register_buffer("variance", torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return functional.batch_norm(x, self.mean, self.variance, training=True)

    strategy = mirrored(2)
    with strategy.scope():
        model: Any = Normed()
    # It need not be in training mode to be written.
    model.eval()

    strategy.run(lambda: model(torch.tensor([[0.0], [2.0]]) + number() * 10))

    torch.testing.assert_close(model.mean, torch.tensor([1.6]))


def test_a_primary_that_is_written_without_count_reaches_the_replicas(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = nn.BatchNorm1d(1)
    strategy.run(lambda: model(torch.randn(4, 1)))
    assert model.running_mean is not None
    model.running_mean.data.zero_()
    model(torch.full((4, 1), 8.0))

    model.eval()
    seen = strategy.run(lambda: model.running_mean.clone())  # type: ignore[union-attr]

    torch.testing.assert_close(torch.cat(seen.values), torch.tensor([0.8, 0.8]))
    torch.testing.assert_close(model.running_mean, torch.tensor([0.8]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_what_nobody_writes_and_all_agree_on_keeps_its_bits(
    mirrored: Make, dtype: torch.dtype
) -> None:
    values = torch.rand(1000).to(dtype)

    def write(module: Any) -> None:
        # All replicas write the same there, and not the same elsewhere.
        module.buffer[:500] += 1
        module.other += number()

    strategy = mirrored(7)
    with strategy.scope():
        module: Any = Holder(values.clone(), write)
        module.register_buffer("other", torch.zeros(1, dtype=dtype))
        module.register_buffer("constant", values.clone())
    for _ in range(2):
        strategy.run(module)

    assert torch.equal(module.constant, values)
    assert torch.equal(module.buffer[500:], values[500:])
    assert torch.equal(module.buffer[:500], values[:500] + 1 + 1)
    assert module.other.item() == 8


def test_a_frozen_layer_keeps_its_bits_beside_one_that_trains(mirrored: Make) -> None:
    strategy = mirrored(3)
    with strategy.scope():
        model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    model[0].running_mean.copy_(torch.rand(2))  # type: ignore[operator]
    before = {name: tensor.clone() for name, tensor in model[0].state_dict().items()}
    model[0].eval()

    for _ in range(3):
        strategy.run(lambda: model(torch.randn(4, 2)))

    assert all(torch.equal(model[0].state_dict()[name], own) for name, own in before.items())
    assert model[1].num_batches_tracked.item() == 3  # type: ignore[operator]


def test_the_statistics_of_a_replica_without_samples_do_not_count(mirrored: Make) -> None:
    strategy = mirrored(3)
    x = uo.PerReplica((torch.ones(2, 1), torch.full((2, 1), 3.0), torch.zeros(0, 1)))

    def write(module: Any) -> None:
        module.buffer += number()

    with strategy.scope():
        module: Any = Holder(torch.zeros(1), write)
    strategy.run(lambda x: module(), args=(x,))

    assert module.buffer.item() == 1.5


def test_a_run_that_fails_changes_no_buffer(mirrored: Make) -> None:
    def write(module: Any) -> None:
        module.buffer += 1
        module.register_buffer("other", torch.ones(1))
        module.large += 1
        if fails:
            raise ArithmeticError

    strategy = mirrored(2)
    with strategy.scope():
        module: Any = Holder(torch.zeros(2), write)
        module.register_buffer("large", torch.zeros(200, 200))
    fails = True
    with pytest.raises(ArithmeticError):
        strategy.run(module)

    assert list(module.state_dict()) == ["buffer", "large"]
    assert module.buffer.tolist() == [0, 0]
    assert strategy.run(lambda: not (module.buffer.any() or module.large.any())) is True
    fails = False
    strategy.run(module)
    assert list(module.state_dict()) == ["buffer", "large", "other"]
    assert module.buffer.tolist() == [1, 1]
    assert module.large.unique().tolist() == [1]


def register(module: Any) -> None:
    module.register_buffer("fresh", torch.full((2,), number().item()), persistent=False)


def resize(module: Any) -> None:
    module.buffer = torch.cat([module.buffer, number().reshape(1)])


def remove(module: Any) -> None:
    if hasattr(module, "buffer"):
        del module.buffer


def fill(module: Any) -> None:
    module.buffer = number()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_replicas_may_register_resize_remove_and_fill_buffers(num_workers: int) -> None:
    def train(strategy: uo.Strategy) -> list[Any]:
        registered = held(strategy, torch.zeros(1), register)
        resized = held(strategy, torch.zeros(1), resize)
        removed = held(strategy, torch.zeros(1), remove)
        filled = held(strategy, None, fill)
        return [
            registered.fresh,
            "fresh" in registered.state_dict(),
            resized.buffer,
            hasattr(removed, "buffer"),
            filled.buffer,
            strategy.experimental_local_results(strategy.run(lambda: resized.buffer.tolist())),
        ]

    for found in on_strategies(num_workers, train, num_replicas=4 // num_workers):
        assert found[0].tolist() == [2.5, 2.5]
        assert found[1] is False
        assert found[2].tolist() == [0, 2.5, 2.5]
        assert found[3] is False
        assert found[4].item() == 2.5
        assert all(one == [0, 2.5, 2.5] for one in found[5])


@pytest.mark.parametrize("num_workers", [1, 2])
def test_replicas_that_set_buffers_of_different_shapes(num_workers: int) -> None:
    def write(module: Any) -> None:
        module.buffer = torch.zeros(1 + replica_id())

    def train(strategy: uo.Strategy) -> Any:
        with pytest.raises(ReplicaMismatchError, match=r"Holder\.buffer") as raised:
            held(strategy, torch.zeros(9), write)
        return str(raised.value)

    for message in on_strategies(num_workers, train, num_replicas=4 // num_workers):
        assert "float32 of shape (4,) on replica 3" in message
        assert "plain attribute" in message


def test_a_buffer_of_two_modules_is_one_for_each_replica(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        first: Any = Holder(torch.zeros(1), add)
        second: Any = Holder(first.buffer, add)

    def step() -> bool:
        first()
        second()
        return first.buffer is second.buffer

    assert strategy.run(step) is True
    assert first.buffer.item() == 3
    assert first.buffer is second.buffer


def test_a_model_that_ends_leaves_no_work(mirrored: Make) -> None:
    strategy = mirrored(2)
    first: Any = held(strategy, torch.zeros(1), add)
    second = held(strategy, torch.zeros(1), add)
    ended = weakref.ref(first)

    del first
    gc.collect()
    assert ended() is None
    strategy.run(second)
    seen = strategy.run(lambda: second.buffer)
    strategy.run(second)

    # Its replicas have the same buffers as before: nothing was laid out again.
    now = strategy.run(lambda: second.buffer)
    assert [one is other for one, other in zip(seen.values, now.values, strict=True)] == [True] * 2
    assert second.buffer.item() == 6


def normalized(strategy: uo.Strategy) -> tuple[uo.Strategy, nn.Module, Callable[[], None]]:
    with strategy.scope():
        model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
        model.register_buffer("hits", torch.zeros(6, dtype=torch.int32))
        model.register_buffer("mask", torch.arange(90000.0).reshape(300, 300))

    def step() -> None:
        model.hits[replica_id()] += 1  # type: ignore[index, operator]
        model(torch.arange(24.0).reshape(2, 3, 4) * number())

    return strategy, model, step


def test_all_layouts_give_the_same_bits() -> None:
    def train(strategy: uo.Strategy) -> list[Tensor]:
        _, model, step = normalized(strategy)
        for _ in range(3):
            strategy.run(step)
        return list(model.state_dict().values())

    (expected,) = on_strategies(1, train, num_replicas=6)
    assert expected[0].tolist() == [3, 0, 0, 0, 0, 0]
    for num_workers in (2, 3, 6):
        for found in on_strategies(num_workers, train, num_replicas=6 // num_workers):
            assert all(map(torch.equal, found, expected))


def count_collectives(strategy: uo.Strategy, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    called: list[str] = []
    communicator = communicator_of(strategy)
    for name in ("all_reduce", "all_gather", "broadcast"):
        original = getattr(communicator, name)

        def counted(*args: Any, name: str = name, original: Any = original) -> Any:
            called.append(name)
            return original(*args)

        monkeypatch.setattr(communicator, name, counted)
    return called


def test_reading_and_evaluation_never_communicate(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(strategy: uo.Strategy) -> Any:
        _, model, step = normalized(strategy)
        strategy.run(step)
        called = count_collectives(strategy, monkeypatch)
        strategy.run(step)
        in_training = list(called)
        called.clear()
        model.state_dict()
        model.eval()
        strategy.run(lambda: model(torch.ones(4, 3)))
        return in_training, list(called), model.state_dict()

    first, second = on_strategies(2, train, num_replicas=2)
    assert first[:2] == second[:2] == (["all_reduce"], [])
    assert all(map(torch.equal, first[2].values(), second[2].values()))


def test_runs_that_not_all_workers_make_are_explained() -> None:
    def train(strategy: uo.Strategy) -> None:
        _, _, step = normalized(strategy)
        strategy.run(step)
        if strategy.extended.first_replica_id == 0:
            strategy.run(step)
        else:
            strategy.reduce("SUM", torch.ones(1))

    with pytest.raises(UnequalCollectivesError) as raised:
        on_strategies(2, train)
    notes = getattr(raised.value, "__notes__", [])
    explained = any("buffers" in note and "same runs" in note for note in notes)
    assert explained or sys.version_info < (3, 11)


@pytest.mark.parametrize("size", [3, 20000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_of_an_uneven_batch_is_that_of_its_samples(
    mirrored: Make, dtype: torch.dtype, size: int
) -> None:
    strategy = mirrored(3)
    with strategy.scope():
        module: Any = nn.Module()
        module.register_buffer("mean", torch.zeros(size, dtype=dtype))
        module.register_buffer("same", torch.zeros(size, dtype=dtype))

    def step(x: Tensor) -> None:
        module.mean.copy_(x.mean().expand(size))
        module.same.fill_(0.1)

    (batch,) = strategy.experimental_distribute_dataset([torch.arange(7, dtype=torch.float64)])
    strategy.run(step, args=(batch,))

    torch.testing.assert_close(module.mean, torch.full((size,), 3, dtype=dtype))
    # What all replicas agree about keeps its bits.
    assert torch.equal(module.same, torch.full((size,), 0.1, dtype=dtype))
