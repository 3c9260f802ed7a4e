"""Metrics of torchmetrics count every sample once, and give the value of one device."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from late import Late
from torch import Tensor, nn
from worker_threads import on_strategies

import unisono as uo
from unisono.errors import ContextError, UnsupportedError

tm = Late("torchmetrics")
own_metric = Late("unit.modules.own_metric")

Make = Callable[..., uo.MirroredStrategy]
# Of the last batch, three replicas have one sample each; of four replicas, one has none.
SIZES = (5, 5, 3)


def samples(num: int = sum(SIZES)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.rand(num, generator=generator), torch.randint(2, (num,), generator=generator)


def batches() -> list[tuple[Tensor, Tensor]]:
    predictions, targets = samples()
    return list(zip(predictions.split(SIZES), targets.split(SIZES), strict=True))


def counted(strategy: uo.Strategy, metric: Any, step: Callable[..., Any]) -> Any:
    for batch in strategy.experimental_distribute_dataset(batches()):
        strategy.run(step, args=batch)
    return metric.compute()


def on_one_device(metric: Any, step: Callable[..., Any]) -> Any:
    for batch in batches():
        step(*batch)
    return metric.compute()


METRICS: dict[str, Callable[[], Any]] = {
    "accuracy": lambda: tm.Accuracy(task="binary"),
    "f1": lambda: tm.F1Score(task="binary"),
    "auroc": lambda: tm.AUROC(task="binary"),
    "auroc with thresholds": lambda: tm.AUROC(task="binary", thresholds=5),
    "calibration": lambda: tm.CalibrationError(task="binary"),
    "confusion": lambda: tm.ConfusionMatrix(task="binary"),
    "mean squared error": lambda: tm.MeanSquaredError(),
    "r2": lambda: tm.R2Score(),
    "rank correlation": lambda: tm.SpearmanCorrCoef(),
    "signal to noise": lambda: tm.image.PeakSignalNoiseRatio(data_range=2.0),
    "of each class": lambda: tm.ClasswiseWrapper(
        tm.Accuracy(task="multiclass", num_classes=2, average=None)
    ),
    "smallest and largest": lambda: tm.MinMaxMetric(tm.Accuracy(task="binary")),
}


@pytest.mark.filterwarnings("ignore:Metric `SpearmanCorrcoef` will save all targets")
@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("name", METRICS)
def test_the_value_is_that_of_one_device(mirrored: Make, name: str, num_replicas: int) -> None:
    plain = METRICS[name]()
    expected = on_one_device(plain, update_of(plain))
    strategy = mirrored(num_replicas)
    with strategy.scope():
        metric = METRICS[name]()

    found = counted(strategy, metric, update_of(metric))

    torch.testing.assert_close(found, expected)
    assert metric.update_count == plain.update_count


def update_of(metric: Any) -> Callable[..., None]:
    def update(predictions: Tensor, targets: Tensor) -> None:
        is_regression = isinstance(metric, (tm.MeanSquaredError, tm.R2Score, tm.SpearmanCorrCoef))
        is_regression |= isinstance(metric, tm.image.PeakSignalNoiseRatio)
        if isinstance(metric, tm.ClasswiseWrapper):
            metric.update((predictions > 0.5).long(), targets)
        else:
            metric.update(predictions, targets.float() if is_regression else targets)

    return update


@pytest.mark.parametrize("name", ["SumMetric", "MeanMetric", "MaxMetric", "MinMetric", "CatMetric"])
def test_aggregates(mirrored: Make, name: str) -> None:
    plain = getattr(tm, name)()
    expected = on_one_device(plain, lambda x, _: plain(x))
    strategy = mirrored(3)
    metric = strategy.mirror(getattr(tm, name)())

    found = counted(strategy, metric, lambda x, _: metric(x))

    # Also the order of what is put together is that of one device.
    torch.testing.assert_close(found, expected)


def test_an_update_outside_counts_once_and_a_reset_resets_all(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        total = tm.SumMetric()
    for expected in (16.0, 16.0):
        total.reset()
        total.update(torch.tensor(3.0))
        (x,) = strategy.experimental_distribute_dataset([torch.tensor([1.0, 2.0, 4.0])])
        strategy.run(total.update, args=(x,))
        total.update(torch.tensor(6.0))
        assert total.compute().item() == expected


def test_a_value_in_the_step_is_that_of_one_device_so_far(mirrored: Make) -> None:
    plain = tm.Accuracy(task="binary")
    strategy = mirrored(3)
    with strategy.scope():
        metric = tm.Accuracy(task="binary")

    def step(predictions: Tensor, targets: Tensor) -> Tensor:
        metric.update(predictions, targets)
        value: Tensor = metric.compute()
        return value

    for batch, whole in zip(
        strategy.experimental_distribute_dataset(batches()), batches(), strict=True
    ):
        plain.update(*whole)
        found = strategy.run(step, args=batch)
        assert [value.item() for value in found.values] == [plain.compute().item()] * 3


def test_once_and_merge_calls_see_what_was_counted_so_far(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        total = tm.SumMetric()

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        total.update(x)
        first = uo.once(total.compute)
        total.update(x)
        context = uo.get_replica_context()
        assert context is not None
        return first, context.merge_call(lambda _: total.compute())

    (x,) = strategy.experimental_distribute_dataset([torch.tensor([1.0, 2.0])])
    first, second = strategy.run(step, args=(x,))

    assert {value.item() for value in strategy.experimental_local_results(first)} == {3.0}
    assert {value.item() for value in strategy.experimental_local_results(second)} == {6.0}
    assert total.compute().item() == 6.0


def test_a_reset_in_the_step_is_one_for_all(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        total, last = tm.SumMetric(), tm.SumMetric()

    def step(x: Tensor) -> None:
        total(x)
        last.reset()
        last(x)

    (x,) = strategy.experimental_distribute_dataset([torch.tensor([1.0, 2.0, 4.0])])
    for _ in range(3):
        strategy.run(step, args=(x,))

    assert (total.compute().item(), last.compute().item()) == (21.0, 7.0)
    # Methods that were taken from the metric before the run do the same.
    strategy.run(total.forward, args=(x,))
    strategy.run(last.reset)
    assert (total.compute().item(), last.sum_value.item()) == (28.0, 0.0)


def test_forward_gives_the_value_of_the_part_or_of_the_batch(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        own, common = tm.SumMetric(), tm.SumMetric(dist_sync_on_step=True)
    (x,) = strategy.experimental_distribute_dataset([torch.tensor([1.0, 2.0, 4.0])])

    for _ in range(2):
        parts, wholes = strategy.run(lambda x: (own(x), common(x)), args=(x,))
        assert [value.item() for value in parts.values] == [3.0, 4.0]
        assert [value.item() for value in wholes.values] == [7.0, 7.0]
    assert own.compute().item() == common.compute().item() == 14.0


def test_states_of_all_kinds(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        metric = own_metric.Own()
    (x,) = strategy.experimental_distribute_dataset([torch.tensor([1.0, 2.0, 3.0, 6.0])])
    strategy.run(metric.update, args=(x,))

    total, average, product, rows = metric.compute()

    assert (total.item(), average.item(), product.item()) == (22.0, 3.0, 36.0)
    assert rows.tolist() == [1.0, 2.0, 3.0, 6.0]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: tm.PearsonCorrCoef(), "'mean_x' with `dist_reduce_fx=None`"),
        (lambda: tm.RunningMean(window=2), "keeps '_num_vals_seen' between updates"),
    ],
)
def test_what_cannot_be_merged_is_refused(mirrored: Make, make: Any, why: str) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        metric = make()
    arguments = (torch.rand(4), torch.rand(4))[: 1 + ("mean_x" in why)]

    with pytest.raises(UnsupportedError, match=r"strategy\.gather") as caught:
        strategy.run(metric.update, args=arguments)
    assert why in str(caught.value)
    # The way out.
    found = strategy.run(lambda: torch.tensor([1.0, 2.0]))
    metric.reset()
    metric.update(*[strategy.gather(found, axis=0)] * len(arguments))
    assert metric.compute().isfinite()


def test_values_that_a_wrapper_keeps_of_batches_are_refused(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        metric = tm.MinMaxMetric(tm.Accuracy(task="binary"))

    # On one device `forward` keeps the largest and smallest values of whole batches.
    with pytest.raises(UnsupportedError, match=r"keeps 'm.._val' between updates"):
        strategy.run(metric, args=samples(4))


def test_a_metric_made_elsewhere_is_refused(mirrored: Make) -> None:
    strategy = mirrored(2)
    metric = tm.SumMetric()

    with pytest.raises(
        ContextError, match=r"SumMetric\.update\(\) was called.*strategy\.mirror\(\)"
    ):
        strategy.run(lambda: metric.update(torch.tensor(1.0)))

    def own() -> Tensor:
        mine = tm.SumMetric()
        mine.update(torch.tensor(2.0))
        value: Tensor = mine.compute()
        return value

    assert [value.item() for value in strategy.run(own).values] == [2.0, 2.0]
    strategy.mirror(metric)
    strategy.run(lambda: metric.update(torch.tensor(1.0)))
    assert metric.compute().item() == 2.0


def test_a_run_that_fails_counts_nothing(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        total = tm.SumMetric()

    def fails() -> None:
        total.update(torch.tensor(1.0))
        raise ValueError("too late")

    with pytest.raises(ValueError, match="too late"):
        strategy.run(fails)
    strategy.run(lambda: total.update(torch.tensor(1.0)))

    assert total.compute().item() == 2.0


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(1, 1)
        self.accuracy = tm.Accuracy(task="binary")
        self.accuracy.persistent(mode=True)

    def forward(self, x: Tensor, y: Tensor) -> None:
        self.accuracy.update(torch.sigmoid(self.dense(x[:, None]))[:, 0], y)


def test_a_metric_that_is_a_part_of_a_model_is_saved_with_it(mirrored: Make) -> None:
    strategy = mirrored(3)
    with strategy.scope():
        model = Classifier()
    for batch in strategy.experimental_distribute_dataset(batches()):
        strategy.run(model, args=batch)

    state = model.state_dict()
    assert sum(int(state[f"accuracy.{name}"]) for name in ("tp", "fp", "tn", "fn")) == 13
    other = Classifier()
    other.load_state_dict(state)
    assert other.accuracy.tp == model.accuracy.tp
    model.load_state_dict(state)
    for batch in strategy.experimental_distribute_dataset(batches()):
        strategy.run(model, args=batch)
    assert sum(int(getattr(model.accuracy, name)) for name in ("tp", "fp", "tn", "fn")) == 26


def test_copies_and_pickles_are_plain_metrics(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        total = tm.SumMetric()
    strategy.run(lambda: total.update(torch.tensor(1.0)))

    for other in (copy.deepcopy(total), total.clone(), pickle.loads(pickle.dumps(total))):
        other.update(torch.tensor(1.0))
        assert (type(other), other.compute().item()) == (tm.SumMetric, 3.0)
    assert b"unisono" not in pickle.dumps(total)
    assert total.compute().item() == 2.0


def test_metrics_are_not_kept_alive_and_do_not_rebuild_models(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        metrics = [tm.CatMetric()]
    for _ in range(2):
        strategy.run(metrics[0].update, args=(torch.ones(1),))
        metrics[0].compute()

    assert strategy.extended.mirrors.are_as_given()
    reference = weakref.ref(metrics.pop())
    gc.collect()
    assert reference() is None


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric SumMetric was called before")
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_all_workers_have_every_sample_once(num_replicas: int) -> None:
    plain = tm.MetricCollection([tm.Accuracy(task="binary"), tm.AUROC(task="binary")])
    expected = on_one_device(plain, plain.update)

    def on_worker(strategy: uo.Strategy) -> list[Any]:
        with strategy.scope():
            metrics = tm.MetricCollection([tm.Accuracy(task="binary"), tm.AUROC(task="binary")])
            total = tm.SumMetric()
        unused = strategy.mirror(tm.SumMetric())

        def step(predictions: Tensor, targets: Tensor) -> Tensor:
            metrics.update(predictions, targets)
            if strategy.extended.first_replica_id == 0:
                # One worker may have something to count that others do not.
                total.update(torch.tensor(1.0))
            value: Tensor = total.compute()
            return value

        counted(strategy, metrics, step)
        total.update(torch.tensor(0.5))
        strategy.run(lambda: None)
        return [metrics.compute(), total.compute().item(), unused.sum_value.item()]

    for values, total, unused in on_strategies(2, on_worker, num_replicas=num_replicas):
        torch.testing.assert_close(values, expected)
        assert (total, unused) == (3.0 * num_replicas + 0.5, 0.0)


def test_runs_without_updates_need_no_other_worker() -> None:
    def on_worker(strategy: uo.Strategy) -> float:
        with strategy.scope():
            total = tm.SumMetric()
        (x,) = strategy.experimental_distribute_dataset([torch.tensor([1.0])])
        # Only the first of four replicas has a sample, and only the first worker counts it.
        strategy.run(total.update, args=(x,))
        if strategy.extended.first_replica_id == 0:
            strategy.run(lambda: None)
        value: float = total.compute().item()
        return value

    assert on_strategies(2, on_worker, num_replicas=2) == [1.0, 1.0]


def test_states_that_are_no_tensors_cannot_travel() -> None:
    def on_worker(strategy: uo.Strategy) -> str:
        with strategy.scope():
            metric = own_metric.Own()

        def step() -> None:
            metric.update(torch.ones(1))
            metric.rows.append("a string")

        with pytest.raises(UnsupportedError, match="'rows' of Own") as caught:
            strategy.run(step)
        return str(caught.value)

    assert all("outside `run`" in text for text in on_strategies(2, on_worker))
