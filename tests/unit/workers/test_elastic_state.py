"""What becomes of the state of an elastic job in one process when workers are lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import unisono as uo
from unisono.errors import UnisonoError, UnsupportedError, WorkerLostError
from unisono.input.split.own_data import OwnStep
from unit.workers.lone_worker import relayout, strategy_of


class Losing:
    """Lets a step lose a worker in some of its runs, once each: the only worker meets alone."""

    def __init__(self, *runs: int) -> None:
        self._runs = list(runs)
        self.num_runs = 0

    def __call__(self) -> None:
        context = uo.get_replica_context()
        assert context is not None
        if context.replica_id_in_sync_group == 1 and self.num_runs in self._runs:
            self._runs.remove(self.num_runs)
            raise WorkerLostError("A worker was lost.", [])


Stateful = Callable[[uo.Strategy], tuple[Callable[[Tensor], Any], Callable[[], Any]]]


def _on_read(strategy: uo.Strategy) -> Any:
    own = uo.Variable(
        0.0,
        synchronization=uo.VariableSynchronization.ON_READ,
        aggregation=uo.VariableAggregation.SUM,
    )
    return lambda x: own.assign_add(x.sum() / 3), lambda: (own.value(), *own.values)


def _of_first_replica(strategy: uo.Strategy) -> Any:
    own = uo.Variable(
        0,
        synchronization=uo.VariableSynchronization.ON_READ,
        aggregation=uo.VariableAggregation.ONLY_FIRST_REPLICA,
    )
    return lambda x: own.assign_add(int(x[0, 0] * 48) + 1), lambda: (own.value(), *own.values)


def _unaggregated(strategy: uo.Strategy) -> Any:
    own = uo.Variable(torch.zeros(8, 6), trainable=False)
    rows = torch.tensor([1, 3])
    return lambda x: own.scatter_add(rows, torch.stack([x[0], x[1]])), lambda: own.values


def _mirrored(strategy: uo.Strategy) -> Any:
    mean = uo.Variable(torch.ones(6), trainable=False, aggregation=uo.VariableAggregation.MEAN)
    return lambda x: mean.assign(mean * 0.5 + x.sum(0)), lambda: mean.values


def _trained(strategy: uo.Strategy) -> Any:
    weights: list[Any] = [
        uo.Variable(torch.ones(6)),
        uo.Variable(1.0, aggregation=uo.VariableAggregation.SUM),
    ]
    optimizer = torch.optim.Adam(weights, lr=0.1)

    def step(x: Tensor) -> None:
        (x * weights[0]).sum().mul(weights[1]).backward()
        optimizer.step()

    return step, lambda: [one.detach() for weight in weights for one in weight.values]


def _accumulated(strategy: uo.Strategy) -> Any:
    torch.manual_seed(1)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runs = Losing()

    def step(x: Tensor) -> None:
        model(x).square().sum().backward()
        if runs.num_runs % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()

    def state() -> Any:
        runs.num_runs += 1
        grad = model.weight.grad
        return model.weight.detach(), torch.zeros(2, 6) if grad is None else grad

    return step, state


def _metrics(strategy: uo.Strategy) -> Any:
    tm = pytest.importorskip("torchmetrics")
    metrics = [tm.MeanMetric(), tm.CatMetric()]

    def step(x: Tensor) -> None:
        for metric in metrics:
            metric.update(x.sum(1))

    return step, lambda: [metric.compute() for metric in metrics]


def _average(strategy: uo.Strategy) -> Any:
    average, model = nn.Linear(6, 2), nn.Linear(6, 2)
    nn.init.ones_(model.weight)
    nn.init.zeros_(average.weight)

    def follow() -> None:
        average.weight.data.lerp_(model.weight.data, 0.1)

    return lambda _: uo.once(follow), lambda: [average.weight.detach()]


def _two_optimizers(strategy: uo.Strategy) -> Any:
    torch.manual_seed(1)
    first, second = nn.Linear(6, 2), nn.Linear(2, 1)
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.1) for one in (first, second)]
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[0], patience=0)

    def step(x: Tensor) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
            second(first(x)).square().mean().backward()
            optimizer.step()
        plateau.step(1.0)

    def state() -> Any:
        rate = torch.tensor(optimizers[0].param_groups[0]["lr"])
        return first.weight.detach(), second.weight.detach(), rate

    return step, state


def _through(hook: Any, state: Any, strategy: uo.Strategy) -> Any:
    strategy.register_comm_hook(state, hook)
    torch.manual_seed(1)
    model = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    def seen() -> list[Tensor]:
        # Of the first replica.
        kept = hook.state_dict()["shares"] if state is None else state.error_dict
        return [model.weight.detach(), *kept.values()]

    return step, seen


def _compressed(strategy: uo.Strategy) -> Any:
    return _through(uo.hooks.Compress(error_feedback=True), None, strategy)


def _of_low_rank(strategy: uo.Strategy) -> Any:
    state = powerSGD_hook.PowerSGDState(
        strategy.process_group, start_powerSGD_iter=2, min_compression_rate=1
    )
    return _through(powerSGD_hook.powerSGD_hook, state, strategy)


@pytest.mark.parametrize(
    "make",
    [
        _on_read,
        _of_first_replica,
        _unaggregated,
        _mirrored,
        _trained,
        _accumulated,
        _metrics,
        _average,
        _two_optimizers,
        _compressed,
        _of_low_rank,
    ],
)
def test_state_is_that_of_an_undisturbed_job_when_workers_are_lost(make: Stateful) -> None:
    found = []
    for lost in ((), (0, 1, 3)):
        with strategy_of(4, elastic=True) as strategy:
            with strategy.scope():
                step, state = make(strategy)
            losing = Losing(*lost)

            def run(x: Tensor, step: Any = step, losing: Losing = losing) -> None:
                step(x)
                losing()

            batches = [torch.arange(48.0).view(8, 6) / 48 + i for i in range(5)]
            seen = []
            for x in strategy.experimental_distribute_dataset(batches):
                strategy.run(run, args=(x,))
                if lost and losing.num_runs == 1:
                    # Other replicas come and go between two runs, too.
                    relayout(strategy, 2)
                    relayout(strategy, 4)
                    # As before workers leave.
                    assert strategy.extended.elastic is not None
                    assert strategy.extended.elastic._all_know()
                seen.append([one.tolist() for one in state()])
                losing.num_runs += 1
            found.append(seen)

    assert found[0] == found[1]


def test_a_variable_that_is_written_outside_runs_is_known_to_the_replicas_that_come() -> None:
    with strategy_of(4, elastic=True) as strategy:
        with strategy.scope():
            own = uo.Variable(
                0,
                synchronization=uo.VariableSynchronization.ON_READ,
                aggregation=uo.VariableAggregation.SUM,
            )
        own.load(7)
        copied = copy.deepcopy(own)
        relayout(strategy, 2)
        relayout(strategy, 4)

        assert [one.item() for one in own.values] == [2, 2, 2, 1]
        assert int(copied) == int(own) == 7


def _made_in_the_run(strategy: uo.Strategy) -> Callable[[], object]:
    return lambda: uo.Variable(1.0)


def _written_by_replicas_and_trained(strategy: uo.Strategy) -> Callable[[], object]:
    with strategy.scope():
        variable = uo.Variable(1.0)
    return lambda: variable.assign_add(1.0)


def _of_a_run_that_failed(strategy: uo.Strategy) -> Callable[[], object]:
    with strategy.scope():
        variable = uo.Variable(1)

    def step() -> None:
        variable.assign_add(1)
        raise KeyError

    with pytest.raises(KeyError):
        strategy.run(step)
    return lambda: variable.name


@pytest.mark.parametrize(
    "make", [_made_in_the_run, _written_by_replicas_and_trained, _of_a_run_that_failed]
)
def test_variables_that_cannot_be_taken_over_are_refused(
    make: Callable[[uo.Strategy], Callable[[], object]],
) -> None:
    with strategy_of(2, elastic=True) as strategy:
        step, losing = make(strategy), Losing(0)

        def run() -> None:
            step()
            losing()

        with pytest.raises(UnsupportedError, match=r"[Vv]ariable|trainable"):
            strategy.run(run)


def test_a_step_of_data_that_workers_read_for_themselves_is_dealt_again() -> None:
    lost: list[Any] = []
    # Workers 0 to 2 had 2, 2 and 1 replicas.
    step = OwnStep((0, 0, 1, 1, 2), (3, 2, 4, 4, 1), lambda *what: lost.append(what))

    assert step.counts_for((0, 0, 0, 2, 2)) == (3, 2, 0, 1, 0)
    assert step.counts_for((0, 0, 0, 0, 0)) == (3, 2, 0, 0, 0)
    # Each lost worker counts once.
    assert step.counts_for((0, 0, 0, 0, 0)) == (3, 2, 0, 0, 0)
    assert lost == [([1], 8), ([2], 1)]
    with pytest.raises(UnsupportedError, match="joined"):
        step.counts_for((0, 1, 1, 2, 3))
    with pytest.raises(UnsupportedError, match="only it had samples"):
        OwnStep((0, 1), (0, 3), lambda *_: None).counts_for((0, 0))


@pytest.mark.parametrize("policy", [uo.AutoShardPolicy.FILE, uo.AutoShardPolicy.OFF])
def test_an_only_worker_reads_all_data_that_it_reads_for_itself(policy: uo.AutoShardPolicy) -> None:
    options = uo.InputOptions(auto_shard_policy=policy)
    seen = []
    with strategy_of(3, elastic=True) as strategy:
        losing = Losing(1)

        def step(x: Tensor) -> Tensor:
            losing()
            return x

        for x in strategy.experimental_distribute_dataset([*torch.arange(10).split(4)], options):
            seen.append(strategy.gather(strategy.run(step, args=(x,)), 0).tolist())
            losing.num_runs += 1

    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_values_from_a_function_are_known_for_all_replicas() -> None:
    with strategy_of(3, elastic=True) as strategy:
        given = strategy.experimental_distribute_values_from_function(
            lambda context: torch.tensor(context.replica_id_in_sync_group)
        )
        losing = Losing(0)

        def step(x: Tensor) -> Tensor:
            losing()
            return x.view(1)

        assert strategy.gather(strategy.run(step, args=(given,)), 0).tolist() == [0, 1, 2]


OFF = uo.InputOptions(auto_shard_policy=uo.AutoShardPolicy.OFF)


def _position(strategy: uo.Strategy) -> None:
    strategy.experimental_distribute_dataset([torch.ones(4)], OFF).state_dict()


def _admission(strategy: uo.Strategy) -> None:
    assert isinstance(strategy, uo.MultiWorkerMirroredStrategy)
    data = strategy.experimental_distribute_dataset([torch.ones(4)], OFF)
    strategy.experimental_admit(uo.experimental.Checkpoint(input=data))


def _cluster(strategy: uo.Strategy) -> None:
    strategy.configure(cluster_spec={"worker": ["localhost:1"]}, task_type="worker", task_id=0)


@pytest.mark.parametrize(
    "refused",
    [
        _position,
        _admission,
        _cluster,
        lambda strategy: distributed.all_reduce(torch.ones(1), group=strategy.process_group),
    ],
)
def test_what_only_one_worker_would_know_is_refused(refused: Callable[[uo.Strategy], None]) -> None:
    with strategy_of(2, elastic=True) as strategy, pytest.raises(UnsupportedError, match="elastic"):
        refused(strategy)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_replicas": 2, "min_workers": 0},
        {"num_replicas": 2, "min_workers": 3},
        # Fewer have started.
        {"num_replicas": 2, "min_workers": 2},
        {
            "num_replicas": 2,
            "communication_options": uo.experimental.CommunicationOptions(
                implementation=uo.experimental.CommunicationImplementation.NCCL
            ),
        },
    ],
)
def test_settings_that_an_elastic_job_cannot_have(settings: dict[str, Any]) -> None:
    with pytest.raises(UnisonoError):
        uo.MultiWorkerMirroredStrategy(elastic=True, **settings)


def test_a_job_that_is_not_elastic_has_no_least_number_of_workers() -> None:
    with pytest.raises(UnsupportedError, match="elastic=True"):
        uo.MultiWorkerMirroredStrategy(min_workers=2)
