import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_replica import replica_id
from torch import Tensor, nn

import unisono as uo
from unisono.errors import DeviceError, ReplicaMismatchError, UnsupportedError

Make = Callable[..., uo.MirroredStrategy]


def test_run_gives_one_value_a_replica(mirrored: Make) -> None:
    assert mirrored().run(lambda: replica_id() + 1).values == (1, 2)


def test_run_takes_and_gives_structures(mirrored: Make) -> None:
    def step(x: int) -> dict[str, int]:
        return {"a": 2 * x, "b": x**2}

    result = mirrored().run(step, args=(uo.PerReplica((1, 2)),))

    assert (result["a"].values, result["b"].values) == ((2, 4), (1, 4))


def test_run_takes_keyword_arguments(mirrored: Make) -> None:
    def step(a: int, b: int) -> int:
        return a + 2 * b + 2

    kwargs = {"a": uo.PerReplica((2, 4)), "b": uo.PerReplica((1, 4))}

    assert mirrored().run(step, kwargs=kwargs).values == (6, 14)


def test_run_takes_nested_arguments(mirrored: Make) -> None:
    def step(x: Any) -> int:
        return int(x["a"][0] + x["b"])

    result = mirrored().run(step, args=[{"a": [uo.PerReplica((1, 10))], "b": 5}])

    assert result.values == (6, 15)


def test_what_is_the_same_is_not_wrapped(mirrored: Make) -> None:
    tensor = torch.ones(2)
    strategy = mirrored()

    assert strategy.run(lambda: 4) == 4
    assert strategy.run(lambda: None) is None
    assert strategy.run(lambda: tensor) is tensor


def test_other_structures_are_an_error(mirrored: Make) -> None:
    with pytest.raises(ReplicaMismatchError, match="Replica 1"):
        mirrored().run(lambda: [0] * replica_id())


def test_a_value_for_fewer_replicas_is_an_error(mirrored: Make) -> None:
    with pytest.raises(ReplicaMismatchError, match="none for replica 1"):
        mirrored().run(lambda x: x, args=(uo.PerReplica((1,)),))


@pytest.mark.parametrize("args", [torch.ones(2), "ab", 5])
def test_args_are_a_list_or_tuple(mirrored: Make, args: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"args=\(x,\)"):
        mirrored().run(lambda x: x, args=args)


def test_local_results_are_always_a_tuple(mirrored: Make) -> None:
    strategy = mirrored()
    value = uo.PerReplica((1, 10))

    assert strategy.experimental_local_results(value) == (1, 10)
    assert strategy.experimental_local_results(5) == (5,)
    assert strategy.experimental_local_results([value, 1]) == ([1, 1], [10, 1])
    assert strategy.unwrap(value) == (1, 10)
    assert mirrored(1).experimental_local_results(5) == (5,)


def test_properties(mirrored: Make) -> None:
    strategy = mirrored(3)
    extended = strategy.extended

    assert strategy.num_replicas_in_sync == extended.num_replicas_in_sync == 3
    assert [str(d) for d in extended.worker_devices] == ["cpu:0", "cpu:1", "cpu:2"]
    assert extended.parameter_devices == extended.worker_devices
    assert strategy.cluster_resolver is None
    assert not extended.experimental_between_graph
    assert not extended.experimental_require_static_shapes
    assert extended.experimental_should_init
    assert extended.should_checkpoint
    assert extended.should_save_summary
    assert repr(strategy) == "MirroredStrategy(cpu:0, cpu:1, cpu:2)"


def test_one_device_without_devices() -> None:
    if torch.cuda.is_available():
        pytest.skip("this host has GPUs")

    assert uo.MirroredStrategy().num_replicas_in_sync == 1


@pytest.mark.parametrize(
    ("devices", "message"),
    [([], "empty"), (["cpu:0", "/cpu:0"], "one replica"), (["cuda:99"], "99"), (["tpu"], "tpu")],
)
def test_devices_that_cannot_be(devices: list[str], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        uo.MirroredStrategy(devices)


def test_spellings_of_devices() -> None:
    strategy = uo.MirroredStrategy(["/cpu:0", "CPU:1", "/job:worker/task:0/device:CPU:2"])

    assert [d.index for d in strategy.extended.worker_devices] == [0, 1, 2]


def test_an_unknown_way_to_reduce_gradients_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"`reduce_gradients` must be one of .* 'total'"):
        uo.MirroredStrategy(["cpu:0"], reduce_gradients="total")


def test_the_way_to_reduce_gradients_may_be_a_name() -> None:
    strategy = uo.MirroredStrategy(["cpu:0"], reduce_gradients="sum")

    assert strategy.extended.reduce_gradients is uo.ReduceOp.SUM


def test_a_deep_copy_is_another_strategy(mirrored: Make) -> None:
    strategy = mirrored(2, serial=True)

    other = copy.deepcopy(strategy)

    assert type(other) is uo.MirroredStrategy
    assert other.extended is not strategy.extended
    assert other.extended.worker_devices == strategy.extended.worker_devices
    assert other.run(lambda: uo.get_strategy() is other) is True
    with strategy.scope(), pytest.raises(RuntimeError):
        other.run(replica_id)
    other.close()


def test_a_shallow_copy_is_refused(mirrored: Make) -> None:
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.copy(mirrored())


def test_initialize_and_finalize(mirrored: Make) -> None:
    strategy = mirrored()

    assert strategy.experimental_initialize() == []
    strategy.run(replica_id)
    assert strategy.experimental_finalize() == []
    assert strategy.run(replica_id).values == (0, 1)


def test_update_config_proto_gives_a_copy(mirrored: Make) -> None:
    config = {"a": [1]}

    updated = mirrored().update_config_proto(config)

    assert updated == config
    assert updated["a"] is not config["a"]


def test_values_from_function_are_always_wrapped(mirrored: Make) -> None:
    strategy = mirrored()

    def value(context: Any) -> int:
        return int(10 * context.replica_id_in_sync_group + context.num_replicas_in_sync)

    values = strategy.experimental_distribute_values_from_function(value)

    assert values.values == (2, 12)
    assert isinstance(
        strategy.experimental_distribute_values_from_function(lambda _: 5), uo.PerReplica
    )
    assert strategy.run(lambda x: x + 1, args=(values,)).values == (3, 13)


def test_experimental_run_takes_the_next_element(mirrored: Make) -> None:
    strategy = mirrored()
    iterator = strategy.make_dataset_iterator([torch.arange(4), torch.arange(4) * 10])

    def step(x: Tensor) -> int:
        return int(x.sum())

    assert strategy.experimental_run(step, iterator).values == (1, 5)
    assert strategy.experimental_run(step, iterator).values == (10, 50)
    assert strategy.experimental_run(replica_id).values == (0, 1)


def test_make_input_fn_iterator(mirrored: Make) -> None:
    strategy = mirrored()

    def input_fn(context: uo.InputContext) -> Any:
        size = context.get_per_replica_batch_size(8)
        return [torch.full((size,), float(i)) for i in range(4)]

    iterator = strategy.make_input_fn_iterator(input_fn)
    result = strategy.experimental_run(lambda x: x.sum().item(), iterator)

    assert result.values == (0, 4)
    with pytest.raises(UnsupportedError, match="replication_mode"):
        strategy.make_input_fn_iterator(input_fn, "per replica")  # type: ignore[arg-type]


def test_numpy_datasets(mirrored: Make) -> None:
    strategy = mirrored()
    rows = strategy.experimental_make_numpy_dataset(torch.arange(4).numpy())

    assert len(rows) == 4


def test_the_default_strategy_runs_the_function() -> None:
    strategy = uo.get_strategy()

    assert strategy.run(lambda x: x + 1, args=(4,)) == 5
    assert strategy.reduce("SUM", torch.tensor(4.0)).item() == 4
    assert strategy.experimental_local_results(4) == (4,)
    assert strategy.num_replicas_in_sync == 1


def test_one_device_strategy_trains_an_unchanged_model() -> None:
    strategy = uo.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.item()

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    strategy.run(step)

    assert type(model) is nn.Linear
    assert model.weight.item() == pytest.approx(before - 1)


def test_a_strategy_of_one_host_warns_when_several_workers_were_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)

    uo.MirroredStrategy(["cpu:0", "cpu:1"])

    assert "4 workers were started" in caplog.text
    assert "MultiWorkerMirroredStrategy" in caplog.text


@pytest.mark.parametrize("make", [uo.MirroredStrategy, uo.MultiWorkerMirroredStrategy])
def test_one_worker_is_the_chief_and_healthy(make: Callable[..., uo.Strategy]) -> None:
    strategy = make(devices=["cpu:0", "cpu:1"])

    assert strategy.is_chief
    strategy.check_health()
    assert uo.get_strategy().is_chief
    assert uo.OneDeviceStrategy("cpu:0").is_chief
    strategy.close()
