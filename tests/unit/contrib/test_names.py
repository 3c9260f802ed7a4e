"""The names that `tf.contrib.distribute` had from 1.12 to 1.15."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import unisono as uo
from unisono.contrib import (
    MirroredStrategy,
    Monitor,
    PerDevice,
    StandardInputStep,
    StandardSingleLossStep,
    Step,
)
from unisono.errors import ContextError, DeviceError, UnsupportedError

PAIR = ["cpu:0", "cpu:1"]
# Of these releases, but for the names that only TPUs and writers of strategies had a use for.
EXPORTED = """\
    AllReduceCrossDeviceOps AllReduceCrossTowerOps CollectiveAllReduceStrategy CrossDeviceOps
    CrossTowerOps DistributeConfig DistributionStrategy DistributionStrategyExtended
    MirroredStrategy Monitor MultiWorkerAllReduce OneDeviceStrategy ParameterServerStrategy
    ReductionToOneDeviceCrossDeviceOps ReductionToOneDeviceCrossTowerOps ReplicaContext
    StandardInputStep StandardSingleLossStep Step TPUStrategy TowerContext
    get_cross_replica_context get_cross_tower_context get_distribution_strategy
    get_loss_reduction get_replica_context get_strategy get_tower_context
    has_distribution_strategy has_strategy in_cross_replica_context require_replica_context
    require_tower_context run_standard_tensorflow_server
"""

pytestmark = pytest.mark.filterwarnings("ignore:.*is an older.*:DeprecationWarning")


@pytest.fixture
def pair() -> Iterator[MirroredStrategy]:
    strategy = MirroredStrategy(PAIR)
    yield strategy
    strategy.close()


@pytest.mark.parametrize("name", EXPORTED.split())
def test_a_name_is_there_and_listed(name: str) -> None:
    assert callable(getattr(uo.contrib, name))
    assert name in dir(uo.contrib)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("ParameterServerStrategy", r"unisono\.MultiWorkerMirroredStrategy"),
        ("TPUStrategy", r"unisono\.MirroredStrategy"),
        ("MultiWorkerAllReduce", r"unisono\.MultiWorkerMirroredStrategy"),
        ("run_standard_tensorflow_server", "unisono launch"),
    ],
)
def test_what_makes_no_sense_here_says_what_to_use(name: str, instead: str) -> None:
    with pytest.raises(UnsupportedError, match=instead):
        getattr(uo.contrib, name)(2)


def test_towers_are_counted_and_merge_as_in_1_12(pair: Any) -> None:
    def add_up(distribution: Any, own: Any, *, times: int) -> Any:
        assert uo.contrib.get_tower_context() is None
        assert uo.contrib.get_cross_tower_context() is distribution
        return sum(distribution.unwrap(own)) * times

    def step(three: float) -> Any:
        tower = uo.contrib.get_tower_context()
        uo.contrib.require_tower_context(tower)
        assert isinstance(tower, uo.contrib.TowerContext)
        assert uo.contrib.get_cross_tower_context() is None
        assert (tower.num_towers, tower.is_single_tower) == (2, False)
        assert tower.distribution_strategy is uo.contrib.get_distribution_strategy()
        assert tower.device == tower.distribution_strategy.worker_devices[tower.tower_id]
        own = torch.tensor(three + tower.tower_id)
        return tower.merge_call(add_up, own, times=2) + own

    results = pair.call_for_each_tower(step, 3.0)

    assert [result.item() for result in pair.unwrap(results)] == [17, 18]


def test_contexts_are_known_outside_of_a_strategy() -> None:
    tower = uo.contrib.get_tower_context()

    assert (tower.tower_id, tower.is_single_tower) == (0, True)
    assert not uo.contrib.has_distribution_strategy()
    uo.contrib.require_tower_context(tower)
    uo.contrib.require_replica_context(uo.get_replica_context())
    with MirroredStrategy(PAIR).scope():
        assert uo.contrib.has_distribution_strategy()
        with pytest.raises(ContextError, match="does not run on replica 0"):
            uo.contrib.require_tower_context(tower)


def test_the_loss_reduction_is_that_of_the_strategy() -> None:
    strategy = uo.MirroredStrategy(PAIR, reduce_gradients=uo.ReduceOp.SUM)

    assert uo.contrib.get_loss_reduction() is uo.ReduceOp.MEAN
    with strategy.scope():
        assert uo.contrib.get_loss_reduction() is uo.ReduceOp.SUM


def test_a_number_of_gpus_is_a_list_of_devices() -> None:
    assert MirroredStrategy(num_gpus=0).extended.worker_devices == (uo.Device("cpu", 0),)
    assert MirroredStrategy(None, None, 0).num_replicas_in_sync == 1
    with pytest.raises(DeviceError, match=r"no cuda:\d+ on this host"):
        MirroredStrategy(num_gpus=99)
    with pytest.raises(DeviceError, match="must be 0 or more"):
        MirroredStrategy(num_gpus=-1)
    for wrong in ("2", 1.5):
        with pytest.raises(UnsupportedError, match="must be an int"):
            MirroredStrategy(num_gpus=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_gpus": 1, "num_gpus_per_worker": 1},
        {"devices": PAIR, "num_gpus": 0},
        {
            "devices": PAIR,
            "cross_device_ops": uo.ReductionToOneDevice(),
            "cross_tower_ops": uo.ReductionToOneDevice(),
        },
    ],
)
def test_an_argument_and_its_older_name_exclude_each_other(arguments: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="Give only one of"):
        MirroredStrategy(**arguments)


def test_operations_are_taken_under_their_older_name() -> None:
    ops = uo.HierarchicalCopyAllReduce()

    assert MirroredStrategy(PAIR, cross_tower_ops=ops).extended.cross_device_ops is ops
    assert MirroredStrategy(PAIR, None, None, ops).extended.cross_device_ops is ops


def test_destinations_go_by_their_older_name() -> None:
    value = PerDevice({"cpu:0": torch.ones(()), "cpu:1": torch.ones(())})
    strategy = MirroredStrategy(PAIR)

    total = strategy.reduce(uo.VariableAggregation.SUM, value, destinations="cpu:1")

    assert total.values[0].item() == 2
    assert strategy.reduce("SUM", value, 0 if value.values[0].dim() else None).item() == 2


def test_batches_have_the_size_of_one_replica() -> None:
    batches = [torch.arange(2), torch.arange(2, 4)]

    dealt = MirroredStrategy(PAIR).make_dataset_iterator(batches).get_next()
    split = uo.MirroredStrategy(PAIR).make_dataset_iterator(batches).get_next()

    assert [part.tolist() for part in dealt.values] == [[0, 1], [2, 3]]
    assert [part.tolist() for part in split.values] == [[0], [1]]


def test_the_values_of_devices_are_found_by_their_names(pair: MirroredStrategy) -> None:
    value = PerDevice({"/cpu:0": 1.0, "/cpu:1": 2.0})

    assert (value.get("cpu:1"), value.get("/job:localhost/device:CPU:0")) == (2, 1)
    assert pair.run(value.get).values == (1, 2)
    with pytest.raises(DeviceError, match="none on cpu:2"):
        value.get("cpu:2")
    with pytest.raises(
        UnsupportedError, match=r"a mapping from devices to values, got .* of type list"
    ):
        PerDevice([1.0])  # type: ignore[arg-type]


def steps_of(strategy: uo.Strategy, per_call: int = 1) -> tuple[nn.Module, Step]:
    with strategy.scope():
        torch.manual_seed(0)
        model = nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_fn(context: Any, inputs: Any) -> Any:
        loss = model(inputs).square().mean()
        context.set_last_step_output("loss", loss.detach(), uo.ReduceOp.MEAN)
        return loss

    def batches() -> list[torch.Tensor]:
        return [torch.full((2, 1), float(i)).double() for i in range(8)]

    return model, StandardSingleLossStep(batches, loss_fn, optimizer, strategy, per_call)


def test_a_monitor_trains_until_the_input_ends(pair: MirroredStrategy) -> None:
    model, step = steps_of(pair)
    reference, alone = steps_of(uo.OneDeviceStrategy("cpu:0"))
    batches = [torch.full((2, 1), float(i)).double() for i in range(8)]
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)

    Monitor(step).run_steps()
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        optimizer.zero_grad()
        reference(torch.cat([first, second])).square().mean().backward()
        optimizer.step()

    for own, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)
    assert alone.distribution.num_replicas_in_sync == 1


def test_a_step_gives_its_outputs_and_begins_anew(pair: MirroredStrategy) -> None:
    _, step = steps_of(pair, per_call=2)

    Monitor(step).run_steps(1)
    context: Any = step()
    with pytest.raises(uo.errors.EndOfInputError):
        step()
    step.initialize()

    assert context.last_step_outputs["loss"].shape == ()
    assert step() is not None


def test_a_step_must_be_written_and_has_no_session() -> None:
    strategy = MirroredStrategy(PAIR)
    step = StandardInputStep(lambda: [torch.ones(1)], strategy)

    with pytest.raises(NotImplementedError, match="must override `__call__"):
        step()
    Step(strategy).initialize()
    with pytest.raises(UnsupportedError, match="no sessions"):
        Monitor(step, session=3)


def test_a_configuration_is_a_record() -> None:
    strategy = MirroredStrategy(PAIR)

    config = uo.contrib.DistributeConfig(train_distribute=strategy)

    assert config == (strategy, None, None)


def test_only_older_names_warn() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in uo.contrib.__all__:
            getattr(uo.contrib, name)

    assert caught == []
