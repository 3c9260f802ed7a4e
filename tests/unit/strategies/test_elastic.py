"""What an elastic job is made of, in one process: other replicas, runs undone, known results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as uo
from unisono.communicators import IdentityCommunicator
from unisono.errors import UnisonoError, UnsupportedError, WorkerLostError
from unisono.input.moving import OwnStep
from unisono.reductions import ReductionToOneDevice
from unisono.strategies.known_results import packed, unpacked
from unisono.values import PerReplica
from unisono.variables import Snapshot


class Sum(nn.Module):
    """Adds to a buffer that is no statistic."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().sum()
        return x


class Program:
    """A program whose step uses most of what a step can use."""

    def __init__(self, strategy: uo.Strategy, *, clears: bool = True) -> None:
        self.strategy, self.clears = strategy, clears
        self.seen: list[float] = []
        with strategy.scope():
            torch.manual_seed(3)
            self.model = nn.Sequential(
                nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), Sum(), nn.Linear(8, 2)
            )
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.weight.register_post_accumulate_grad_hook(lambda p: self.seen.append(_first(p.grad)))
        self.generator = torch.Generator().manual_seed(8)

    @property
    def weight(self) -> nn.Parameter:
        weight = self.model[0].weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def step(self, x: Tensor) -> Tensor:
        if self.clears:
            self.optimizer.zero_grad()
        noise = torch.rand(x.shape, generator=self.generator)
        loss: Tensor = self.model(x + noise).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    def run(self) -> Tensor:
        numbers = torch.arange(48.0).view(8, 6) / 48
        (batch,) = self.strategy.experimental_distribute_dataset([numbers])
        mean: Tensor = self.strategy.reduce("MEAN", self.strategy.run(self.step, args=(batch,)))
        return mean

    def state(self) -> dict[str, Any]:
        tensors = {**self.model.state_dict(), "random": torch.get_rng_state()}
        for i, state in enumerate(self.optimizer.state.values()):
            tensors |= {f"{name} {i}": value for name, value in state.items()}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                tensors[f"gradient of {name}"] = parameter.grad
        bits: dict[str, Any] = {name: one.numpy().tobytes() for name, one in tensors.items()}
        bits["generator"] = self.generator.get_state().numpy().tobytes()
        bits["settings"] = [group["lr"] for group in self.optimizer.param_groups]
        return bits | {"scheduler": self.scheduler.state_dict(), "hooks": list(self.seen)}


def _first(grad: Tensor | None) -> float:
    assert grad is not None
    return grad.view(-1)[0].item()


@contextmanager
def strategy_of(num_replicas: int, **settings: Any) -> Iterator[uo.MultiWorkerMirroredStrategy]:
    strategy = uo.MultiWorkerMirroredStrategy(num_replicas=num_replicas, **settings)
    try:
        yield strategy
    finally:
        strategy.close()


def relayout(strategy: uo.Strategy, num_replicas: int) -> None:
    """Gives the only worker other replicas."""
    devices = tuple(uo.Device("cpu", i) for i in range(num_replicas))
    communicator = IdentityCommunicator()
    strategy.extended._relayout(devices, ReductionToOneDevice(), communicator, (num_replicas,))


@pytest.mark.parametrize("clears", [True, False])
def test_new_replicas_go_on_with_the_bits_of_the_old_ones(clears: bool) -> None:
    found = []
    for is_changed in (False, True):
        with strategy_of(4) as strategy:
            program = Program(strategy, clears=clears)
            losses = []
            for i in range(4):
                if is_changed and i > 0:
                    if i == 2:
                        relayout(strategy, 2)
                    relayout(strategy, 4)
                losses.append(program.run())
            found.append(program.state() | {"losses": torch.stack(losses).tolist()})

    assert found[0] == found[1]


def test_replicas_with_gradients_of_their_own_cannot_be_replaced() -> None:
    with strategy_of(2) as strategy:
        program = Program(strategy)

        def step() -> None:
            with strategy.no_sync():
                program.model(torch.rand(4, 6)).sum().backward()

        strategy.run(step)

        with pytest.raises(UnsupportedError, match="not reduced"):
            relayout(strategy, 3)


class Holder(nn.Module):
    """Has attributes of all kinds, and changes one of them in each call."""

    def __init__(self, change: Callable[[Any], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.count = 0
        self.held = [self.layer, {"names": ["a"]}, (1, {2})]
        self.table = torch.zeros(2)
        self.change = change

    def forward(self, inputs: Tensor) -> Tensor:
        self.change(self)
        outputs: Tensor = self.layer(inputs)
        return outputs


OWN: dict[str, Callable[[Any], object]] = {
    "a number": lambda one: setattr(one, "count", one.count + 1),
    "a new attribute": lambda one: setattr(one, "seen", True),
    "a tensor": lambda one: setattr(one, "table", torch.ones(2)),
    "a list": lambda one: one.held.append(3),
    "a list in a dict": lambda one: one.held[1]["names"].append("b"),
    "a set in a tuple": lambda one: one.held[2][1].add(3),
    "a deletion": lambda one: delattr(one, "count") if hasattr(one, "count") else None,
}


@pytest.mark.parametrize("change", OWN.values(), ids=OWN)
def test_replicas_with_attributes_of_their_own_cannot_be_replaced(
    change: Callable[[Any], object],
) -> None:
    with strategy_of(2) as strategy:
        with strategy.scope():
            model = Holder(change)
        strategy.run(lambda: model(torch.rand(4, 6)).sum().backward())

        with pytest.raises(UnsupportedError, match="has changed the attribute"):
            relayout(strategy, 3)


SHARED: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "nothing": (lambda: Holder(lambda one: None), 0),
    "a tensor with a graph": (
        lambda: Holder(lambda one: setattr(one, "kept", one.layer.weight * 2)),
        0,
    ),
    "a recurrent layer": (lambda: nn.LSTM(6, 3), 1),
    "a normalized weight": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), 0),
}


@pytest.mark.parametrize(("make", "is_tuple"), SHARED.values(), ids=SHARED)
def test_replicas_that_have_what_all_have_can_be_replaced(
    make: Callable[[], nn.Module], is_tuple: bool
) -> None:
    with strategy_of(2) as strategy:
        with strategy.scope():
            model = make()

        def step() -> Tensor:
            outputs = model(torch.ones(4, 6))
            loss: Tensor = (outputs[0] if is_tuple else outputs).sum()
            loss.backward()
            return loss.detach()

        before = strategy.run(step)
        # What the program changes itself reaches the replicas that come, too.
        model.eval()
        relayout(strategy, 3)
        after = strategy.run(step)

    assert after.values[0].tolist() == before.values[0].tolist()


@pytest.mark.parametrize("num_runs_before", [0, 2])
@pytest.mark.parametrize("clears", [True, False])
def test_a_run_that_is_undone_leaves_no_trace_but_what_python_did(
    clears: bool, num_runs_before: int
) -> None:
    with strategy_of(3) as strategy:
        program = Program(strategy, clears=clears)
        snapshot = Snapshot(strategy.extended.mirrors)
        for _ in range(num_runs_before):
            program.run()
        before = program.state()

        def again() -> dict[str, Any]:
            program.seen = before["hooks"][:]
            program.run()
            return program.state()

        snapshot.begin(keep_gradients=True)
        first = again()
        assert first["0.weight"] != before["0.weight"]
        for _ in range(2):
            snapshot.restore()
            strategy.extended._undo_drawing()
            relayout(strategy, 3)
            after = program.state() | {"hooks": before["hooks"]}
            assert [name for name in before if before[name] != after[name]] == []
            assert after.keys() == before.keys()
            assert again() == first
        snapshot.end()


def test_the_loss_scale_is_undone_too() -> None:
    with strategy_of(2) as strategy:
        program = Program(strategy)
        with strategy.scope():
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)

        def step() -> None:
            program.optimizer.zero_grad()
            scaler.scale(program.model(torch.ones(4, 6)).mean()).backward()
            scaler.step(program.optimizer)
            scaler.update()

        strategy.run(step)
        before = scaler.state_dict()
        snapshot = Snapshot(strategy.extended.mirrors)
        snapshot.begin(keep_gradients=True)
        strategy.run(step)
        assert scaler.get_scale() == 2 * before["scale"]

        snapshot.restore()

        assert scaler.state_dict() == before


def test_an_elastic_job_of_one_process_has_the_bits_of_one_that_is_not_elastic() -> None:
    found = []
    for elastic in (False, True):
        with strategy_of(3, elastic=elastic) as strategy:
            program = Program(strategy)
            losses = [program.run().item() for _ in range(3)]
            assert strategy.is_chief
            found.append(program.state() | {"losses": losses})

    assert found[0] == found[1]


def test_what_all_know_of_results_is_reduced_and_gathered_as_other_values_are() -> None:
    (batch,) = [torch.arange(8.0).view(4, 2)]

    def step(x: Tensor) -> tuple[Tensor, Tensor, int]:
        return x.sum(), x, len(x)

    found = []
    for elastic in (False, True):
        with strategy_of(3, elastic=elastic) as strategy:
            (given,) = strategy.experimental_distribute_dataset([batch])
            total, rows, count = strategy.run(step, args=(given,))
            assert (total.known_everywhere is not None) == elastic
            found.append(
                [
                    strategy.reduce("MEAN", total).item(),
                    strategy.reduce("MAX", total).item(),
                    strategy.gather(rows, axis=0).tolist(),
                    float(strategy.reduce("SUM", count)),
                ]
            )

    assert found[0] == found[1]


def test_small_results_arrive_with_their_bits() -> None:
    values = [
        PerReplica((torch.tensor(1.5), torch.tensor(float("nan")))),
        PerReplica(
            (torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(0, 3, dtype=torch.bfloat16))
        ),
        PerReplica((3, True)),
        PerReplica((torch.zeros(5000), torch.zeros(5000))),
        PerReplica(("text", "text")),
    ]
    variables = {3: [torch.zeros(5000), torch.ones(2, dtype=torch.bool)]}
    told = unpacked([packed(values), packed(values, variables, is_asked=True, sign=2)])
    numbers, halves, plain, large, text = told.known

    assert (told.is_asked, told.signs) == (True, [0, 2])
    assert str(told.variables) == str([{}, variables])
    assert numbers is not None
    assert str(numbers) == str(values[0].values * 2)
    assert halves is not None
    assert [(one.dtype, one.shape) for one in halves] == 2 * [
        (torch.bfloat16, (2, 3)),
        (torch.bfloat16, (0, 3)),
    ]
    assert plain == (3, True, 3, True)
    assert large is None
    assert text is None


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


def _hook(strategy: uo.Strategy) -> None:
    strategy.register_comm_hook(None, lambda state, bucket: bucket.buffer())


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
        _hook,
        _position,
        _admission,
        _cluster,
        lambda strategy: strategy.process_group,
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
