"""Batches that do not divide, and those with fewer samples than replicas."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import unisono as uo
from unisono.errors import UnsupportedError

Make = Callable[..., uo.MirroredStrategy]

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "SUM": torch.sum,
    "MEAN": torch.mean,
    "MIN": torch.min,
    "MAX": torch.max,
    "PROD": torch.prod,
}
each_division = pytest.mark.parametrize(
    ("num_samples", "num_replicas"), [(4, 3), (2, 3), (1, 4), (5, 2), (6, 3), (3, 1)]
)


def numbers(num_samples: int) -> Tensor:
    return torch.arange(2.0, 2.0 + num_samples, dtype=torch.float64)


def distributed(strategy: uo.Strategy, *tensors: Tensor, **options: Any) -> Any:
    loader = DataLoader(TensorDataset(*tensors), batch_size=len(tensors[0]))
    dataset = strategy.experimental_distribute_dataset(loader, uo.InputOptions(**options))
    (batch,) = dataset
    return batch


@each_division
@pytest.mark.parametrize("split", ["even", "tensorflow"])
def test_the_mean_of_losses_is_the_mean_over_samples(
    mirrored: Make, split: str, num_samples: int, num_replicas: int
) -> None:
    strategy = mirrored(num_replicas)
    (x,) = distributed(strategy, numbers(num_samples), split=split)

    losses = strategy.run(lambda x: {"mean": x.mean(), "number": x.mean().item()}, args=(x,))
    mean = strategy.reduce("MEAN", losses)

    expected = numbers(num_samples).mean()
    torch.testing.assert_close(mean["mean"], expected)
    assert float(mean["number"]) == pytest.approx(expected.item())


@each_division
def test_the_mean_of_counts_of_a_kind_without_fractions(
    mirrored: Make, num_samples: int, num_replicas: int
) -> None:
    strategy = mirrored(num_replicas)
    (x,) = distributed(strategy, torch.full((num_samples,), 3))

    assert strategy.reduce("MEAN", strategy.run(lambda x: x.max(), args=(x,))) == 3.0


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_a_replica_without_samples_is_left_out_of_every_reduction(
    mirrored: Make, op: str, dtype: torch.dtype
) -> None:
    strategy = mirrored(3)
    (x,) = distributed(strategy, numbers(2).to(dtype))

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        context = uo.get_replica_context()
        assert context is not None
        own = x.sum() if context.counts else x.sum() + 1000
        return own, context.all_reduce(op, own)

    own, reduced = strategy.run(step, args=(x,))

    expected: float = OPS[op](numbers(2)).item()
    assert strategy.reduce(op, own).item() == pytest.approx(expected)
    assert [one.item() for one in reduced.values] == [pytest.approx(expected)] * 3
    with strategy.scope():
        assert strategy.extended.batch_reduce_to(op, [(own, "cpu:0")])[0].item() == pytest.approx(
            expected
        )


@each_division
@pytest.mark.parametrize("split", ["even", "tensorflow"])
def test_samples_come_once_from_gather_axis_and_local_results(
    mirrored: Make, split: str, num_samples: int, num_replicas: int
) -> None:
    strategy = mirrored(num_replicas)
    (x,) = distributed(strategy, numbers(num_samples), split=split)

    seen = strategy.run(lambda x: {"x": x}, args=(x,))

    expected = numbers(num_samples)
    assert strategy.gather(seen["x"], 0).tolist() == expected.tolist()
    assert strategy.reduce("SUM", seen["x"], axis=0) == expected.sum()
    assert strategy.reduce("MEAN", seen["x"], axis=0) == expected.mean()
    parts = [own["x"] for own in strategy.experimental_local_results(seen)]
    assert [one for part in parts for one in part.tolist()] == expected.tolist()
    assert torch.cat(strategy.experimental_local_results(seen["x"])).tolist() == expected.tolist()


@pytest.mark.parametrize("num_samples", [2, 4])
def test_gradients_flow_through_collectives_of_the_replicas_that_count(
    mirrored: Make, num_samples: int
) -> None:
    def loss_of(x: Tensor, everything: Tensor, mean: Tensor) -> Tensor:
        return (x * everything.sum()).mean() + mean**2

    def on_one_device() -> Tensor:
        weight = torch.ones((), dtype=torch.float64, requires_grad=True)
        scaled = numbers(num_samples) * weight
        loss_of(scaled, scaled**2, scaled.sum()).backward()
        assert weight.grad is not None
        return weight.grad

    strategy = mirrored(3)
    with strategy.scope():
        weight = uo.Variable(torch.ones((), dtype=torch.float64))
    (x,) = distributed(strategy, numbers(num_samples))

    def step(x: Tensor) -> None:
        context = uo.get_replica_context()
        assert context is not None
        scaled = x * weight
        gathered = context.all_gather(scaled**2, axis=0)
        assert len(gathered) == num_samples
        loss_of(scaled, gathered, context.all_reduce("SUM", scaled.sum())).backward()

    strategy.run(step, args=(x,))

    for component in weight.values:
        torch.testing.assert_close(component.grad, on_one_device())


@pytest.mark.parametrize("num_samples", [1, 2, 6])
def test_gradients_flow_through_a_mean_over_the_replicas_that_count(
    mirrored: Make, num_samples: int
) -> None:
    one = torch.full((), 2.0, dtype=torch.float64, requires_grad=True)
    scaled = numbers(num_samples) * one
    (scaled * scaled.mean() ** 2).mean().backward()

    strategy = mirrored(3)
    with strategy.scope():
        weight = uo.Variable(torch.full((), 2.0, dtype=torch.float64))
    (x,) = distributed(strategy, numbers(num_samples))

    def step(x: Tensor) -> None:
        context = uo.get_replica_context()
        assert context is not None
        scaled = x * weight
        (scaled * context.all_reduce("MEAN", scaled.mean()) ** 2).mean().backward()

    strategy.run(step, args=(x,))

    for component in weight.values:
        torch.testing.assert_close(component.grad, one.grad)


class Upscale(nn.Module):
    """`PixelShuffle` refuses an empty batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.pixel_shuffle(self.norm(self.conv(x)), 2)
        return result


def upscale() -> Upscale:
    torch.manual_seed(0)
    return Upscale().double()


@pytest.mark.parametrize("reduce_gradients", ["MEAN", "SUM"])
@pytest.mark.parametrize("num_replicas", [2, 3, 5])
def test_a_model_that_takes_no_empty_batch_trains_as_on_one_device(
    mirrored: Make, num_replicas: int, reduce_gradients: str
) -> None:
    data = torch.rand(11, 1, 3, 3, dtype=torch.float64)
    loader = DataLoader(TensorDataset(data), batch_size=4)
    last = DataLoader(TensorDataset(data[:1]), batch_size=4)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        errors: Tensor = model(x).square()
        return errors.mean() if reduce_gradients == "MEAN" else errors.sum()

    one = upscale()
    optimizer = torch.optim.SGD(one.parameters(), 0.01, momentum=0.9)
    for batches in loader, last:
        for (x,) in batches:
            optimizer.zero_grad()
            loss_of(one, x).backward()
            optimizer.step()

    options = {"reduce_gradients": reduce_gradients, "synchronize_batch_norm": True}
    strategy = mirrored(num_replicas, **options)
    with strategy.scope():
        model = upscale()
        shared = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        shared.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        shared.step()
        return loss.detach()

    for batches in loader, last:
        for (x,) in strategy.experimental_distribute_dataset(batches):
            assert strategy.reduce("MEAN", strategy.run(step, args=(x,))).isfinite()

    for name, value in one.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-9, atol=1e-12)


def test_the_gradient_of_a_replica_without_samples_counts_nothing_even_if_it_is_nan(
    mirrored: Make,
) -> None:
    for op, expected in [("MEAN", 2.5), ("SUM", 5.0), ("MIN", 2.0), ("MAX", 3.0), ("PROD", 6.0)]:
        strategy = mirrored(3, reduce_gradients=op)
        with strategy.scope():
            weight = uo.Variable(torch.ones((), dtype=torch.float64))

        def step(x: Tensor, weight: Any = weight) -> None:
            context = uo.get_replica_context()
            assert context is not None
            factor = 1.0 if context.counts else torch.nan
            (x.mean() * weight * factor).backward()

        (x,) = distributed(strategy, numbers(2))
        strategy.run(step, args=(x,))

        assert weight.values[0].grad.item() == pytest.approx(expected)


class Meter(nn.Module):
    """Keeps what metrics keep: numbers, tensors that are replaced or written to, and lists."""

    def __init__(self) -> None:
        super().__init__()
        self.totals: list[Tensor] = []
        self.count = 0
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> None:
        if not self.totals:
            self.totals.append(torch.zeros((), dtype=torch.float64))
        self.totals[0] += x.sum()
        self.count += len(x)
        self.seen = [*self.seen, float(x.sum())]


def test_what_a_replica_without_samples_does_to_modules_is_undone(mirrored: Make) -> None:
    strategy = mirrored(3)
    with strategy.scope():
        meter = Meter()

    for data in numbers(3), numbers(2), numbers(1):
        (x,) = distributed(strategy, data)
        strategy.run(meter, args=(x,))

    def read() -> Any:
        return meter.count, float(meter.totals[0]), len(meter.seen)

    counts, totals, seen = strategy.run(read)
    assert counts.values == seen.values == (3, 2, 1)
    assert totals.values == (6.0, 6.0, 4.0)


def test_statistics_are_those_of_replicas_with_samples(mirrored: Make) -> None:
    strategy = mirrored(3)
    with strategy.scope():
        norm = nn.BatchNorm1d(1, momentum=1.0).double()
    (x,) = distributed(strategy, numbers(2)[:, None].expand(2, 4))

    strategy.run(lambda x: norm(x.reshape(-1, 1)), args=(x,))

    assert float(norm.running_mean) == 2.5  # type: ignore[arg-type]
    assert int(norm.num_batches_tracked) == 1  # type: ignore[arg-type]


def test_variables_leave_a_replica_without_samples_out(mirrored: Make) -> None:
    strategy = mirrored(3)
    on_read = uo.VariableSynchronization.ON_READ
    with strategy.scope():
        seen = uo.Variable(0.0, synchronization=on_read, aggregation=uo.VariableAggregation.SUM)
        total = uo.Variable(0.0, aggregation=uo.VariableAggregation.SUM, trainable=False)
        mean = uo.Variable(0.0, aggregation=uo.VariableAggregation.MEAN, trainable=False)

    def step(x: Tensor) -> None:
        own = x.sum().float()
        seen.assign_add(own)
        total.assign_add(own)
        mean.assign(own)

    (x,) = distributed(strategy, numbers(2))
    strategy.run(step, args=(x,))

    assert (float(seen), float(total), float(mean)) == (5.0, 5.0, 2.5)


def test_a_merge_call_leaves_a_replica_without_samples_out(mirrored: Make) -> None:
    strategy = mirrored(3)
    (x,) = distributed(strategy, numbers(2))

    def merge(strategy: uo.Strategy, value: Any) -> Tensor:
        total: Tensor = strategy.reduce("SUM", value)
        return total

    def step(x: Tensor) -> Tensor:
        context = uo.get_replica_context()
        assert context is not None
        merged: Tensor = context.merge_call(merge, (x.sum(),))
        return merged

    assert strategy.run(step, args=(x,)).item() == 5.0


def test_a_closure_is_minimised_over_samples(mirrored: Make) -> None:
    data = numbers(2)

    def trained(weight: Any, run: Callable[[Callable[[Tensor], Any]], Any]) -> float:
        parameters = [weight]
        optimizer = torch.optim.LBFGS(parameters, line_search_fn="strong_wolfe", max_iter=5)

        def step(x: Tensor) -> None:
            def closure() -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = ((x * weight - 1) ** 2).mean()
                loss.backward()
                return loss

            optimizer.step(closure)

        run(step)
        return float(weight.detach())

    one = torch.ones((), dtype=torch.float64, requires_grad=True)
    expected = trained(one, lambda step: step(data))
    strategy = mirrored(3)
    (x,) = distributed(strategy, data)
    with strategy.scope():
        weight = uo.Variable(torch.ones((), dtype=torch.float64))
        assert trained(weight, lambda step: strategy.run(step, args=(x,))) == pytest.approx(
            expected, rel=1e-12
        )


@dataclass
class Output:
    loss: Tensor
    logits: Tensor
    hidden: Tensor | None = None


def test_a_dataclass_that_a_step_returns_is_reduced_as_a_structure(mirrored: Make) -> None:
    strategy = mirrored(3)
    (x,) = distributed(strategy, numbers(4))

    output = strategy.run(lambda x: Output(x.mean(), x), args=(x,))

    assert isinstance(output, Output)
    assert strategy.reduce("MEAN", output.loss).item() == numbers(4).mean().item()
    assert strategy.gather(output.logits, 0).tolist() == numbers(4).tolist()
    assert strategy.reduce("SUM", Output(output.loss, output.loss)).hidden is None


def test_batches_split_in_other_proportions_are_refused_in_one_step(mirrored: Make) -> None:
    strategy = mirrored(2)
    (few,) = distributed(strategy, numbers(3))
    (many,) = distributed(strategy, numbers(8))

    with pytest.raises(UnsupportedError, match="different proportions"):
        strategy.run(lambda few, many: None, args=(few, many))


def test_batches_that_go_whole_to_each_replica_are_told_of_once(
    mirrored: Make, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = mirrored(2)

    with caplog.at_level(logging.WARNING, "unisono"):
        graph = torch.zeros(5, 2)
        for scalar in 1.0, 2.0:
            strategy.run(lambda *_: None, args=(graph, torch.tensor(scalar)))
        assert not caplog.records
        for _ in range(2):
            strategy.run(lambda *_: None, args=({"x": torch.zeros(3, 2)},))

    (record,) = caplog.records
    assert "shape (3, 2)" in record.getMessage()
    assert "experimental_distribute_dataset" in record.getMessage()


def test_a_program_that_distributes_is_told_nothing(
    mirrored: Make, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = mirrored(2)
    (x,) = distributed(strategy, numbers(4))

    with caplog.at_level(logging.WARNING, "unisono"):
        strategy.run(lambda *_: None, args=(x,))
        for _ in range(3):
            strategy.run(lambda *_: None, args=(torch.zeros(4),))

    assert not caplog.records


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_distributed_sampler_in_a_loader_loses_no_samples_and_is_told_of_once(
    mirrored: Make, shuffle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    data = TensorDataset(torch.arange(11))
    sampler: Any = DistributedSampler(data, num_replicas=4, rank=2, shuffle=shuffle, seed=3)
    whole: Any = DistributedSampler(data, num_replicas=1, rank=0, shuffle=shuffle, seed=3)
    strategy = mirrored(2)
    loader = DataLoader(data, batch_size=4 + shuffle, sampler=sampler)

    with caplog.at_level(logging.WARNING, "unisono"):
        dataset = strategy.experimental_distribute_dataset(loader)
        strategy.experimental_distribute_dataset(loader)
        for epoch in range(2):
            dataset.sampler.set_epoch(epoch)
            whole.set_epoch(epoch)
            seen = [strategy.gather(x, 0).tolist() for (x,) in dataset]
            assert [i for batch in seen for i in batch] == list(whole)

    (record,) = caplog.records
    assert "part 2 of 4" in record.getMessage()
    assert f"batch size of {4 + shuffle} is the global one" in record.getMessage()


def test_a_distributed_sampler_of_another_kind_is_refused(mirrored: Make) -> None:
    class Odd(DistributedSampler[Any]):
        pass

    data = TensorDataset(torch.arange(4))
    loader = DataLoader(data, batch_size=2, sampler=Odd(data, num_replicas=2, rank=0))
    strategy = mirrored(2)

    with pytest.raises(UnsupportedError, match=r"an? Odd, which reads part 0 of 2"):
        strategy.experimental_distribute_dataset(loader)
    with pytest.raises(UnsupportedError, match="`num_replicas=1, rank=0`"):
        strategy.distribute_datasets_from_function(lambda _: loader)


def test_a_distributed_dataset_has_what_programs_ask_a_loader_for(mirrored: Make) -> None:
    data = TensorDataset(torch.arange(11))
    loader = DataLoader(data, batch_size=4, drop_last=True)
    strategy = mirrored(2)

    for dataset in (
        strategy.experimental_distribute_dataset(loader),
        strategy.distribute_datasets_from_function(lambda _: loader),
    ):
        assert len(dataset.dataset) == 11
        assert (dataset.batch_size, dataset.drop_last) == (4, True)
        assert dataset.sampler is loader.sampler
        assert dataset.batch_sampler is loader.batch_sampler
    assert len(strategy.experimental_distribute_dataset(loader)) == 2
    with pytest.raises(AttributeError, match="no attribute 'dataset'"):
        _ = strategy.experimental_distribute_dataset([torch.arange(3)]).dataset
