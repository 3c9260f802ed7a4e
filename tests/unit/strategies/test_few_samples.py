"""Batches that do not divide, and those with fewer samples than replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo
from unit.strategies.samples import distributed, numbers

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
@pytest.mark.parametrize("split", ["even", "tensorflow"])
def test_a_step_that_weights_its_values_has_the_mean_over_samples(
    mirrored: Make, split: str, num_samples: int, num_replicas: int
) -> None:
    strategy = mirrored(num_replicas)
    (x,) = distributed(strategy, numbers(num_samples), split=split)

    def step(x: Tensor) -> Tensor:
        context = uo.get_replica_context()
        assert context is not None
        own = x.mean() if context.counts else x.new_tensor(1000.0)
        mean: Tensor = context.all_reduce("MEAN", own * context.weight)
        return mean

    means = strategy.experimental_local_results(strategy.run(step, args=(x,)))

    for mean in means:
        torch.testing.assert_close(mean, numbers(num_samples).mean())


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
