"""Rows of names that other versions of TensorFlow have."""

from __future__ import annotations

import os
import signal
import tempfile
from typing import Any

import pytest
import torch

import unisono as uo
from tensorflow_rows.table import (
    MEAN,
    OLD_MEAN,
    OLD_SUM,
    PAIR,
    SUM,
    is_mirrored,
    kept,
    names,
    older,
    pair,
    plain,
    pr,
    row,
    sgd,
)
from unisono import contrib
from unisono.errors import (
    ContextError,
    UnsupportedError,
)

OTHER = "Names of other versions"


@row(OTHER, "`tf.distribute.experimental.MultiWorkerMirroredStrategy(")
def _() -> None:
    kind = uo.experimental.MultiWorkerMirroredStrategy
    assert names(kind) == ["communication", "cluster_resolver"]
    with pytest.warns(DeprecationWarning, match="is an older"):
        assert isinstance(kept(kind()), uo.MultiWorkerMirroredStrategy)


@row(OTHER, "`tf.distribute.experimental.CollectiveCommunication`")
def _() -> None:
    experimental = uo.experimental
    assert experimental.CollectiveCommunication is experimental.CommunicationImplementation
    with pytest.warns(DeprecationWarning, match="is an older"):
        assert experimental.CollectiveHints(3) == experimental.CommunicationOptions(3)


@row(OTHER, "`tf.distribute.experimental.ValueContext`")
def _() -> None:
    seen: list[Any] = []
    pair().experimental_distribute_values_from_function(seen.append)
    assert seen == [uo.experimental.ValueContext(i, 2) for i in range(2)]


@row(OTHER, "`tf.distribute.RunOptions`")
def _() -> None:
    assert pair().run(lambda: 1, options=uo.RunOptions()) == 1


@row(OTHER, "`tf.Variable(")
def _() -> None:
    assert names(uo.Variable) == [
        "initial_value",
        "trainable",
        "validate_shape",
        "caching_device",
        "name",
        "variable_def",
        "dtype",
        "import_scope",
        "constraint",
        "synchronization",
        "aggregation",
        "shape",
    ]
    refused: tuple[tuple[str, Any], ...] = (
        ("validate_shape", False),
        ("caching_device", "cpu:0"),
        ("variable_def", 1),
        ("import_scope", "a"),
        ("constraint", abs),
    )
    for name, value in refused:
        with pytest.raises(UnsupportedError, match=name):
            uo.Variable(1.0, **{name: value})


@row(OTHER, "`variable.distribute_strategy`")
def _() -> None:
    strategy = pair()
    with strategy.scope():
        variable = uo.Variable(1.0)
    assert variable.distribute_strategy is variable.strategy is strategy


@row(OTHER, "`dataset.element_spec`")
def _() -> None:
    dataset = pair().experimental_distribute_dataset([torch.ones(4, 3)])
    spec = uo.TensorSpec((None, 3), torch.float32)
    assert dataset.element_spec.values == iter(dataset).element_spec.values == (spec, spec)


@row(OTHER, "`tf.distribute.cluster_resolver.SlurmClusterResolver(")
def _() -> None:
    kind = uo.cluster_resolver.SlurmClusterResolver
    environ = {
        "SLURM_JOB_ID": "1",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "SLURM_STEP_NODELIST": "a",
    }
    assert names(kind)[:-1] == [
        "jobs",
        "port_base",
        "gpus_per_node",
        "gpus_per_task",
        "tasks_per_node",
        "auto_set_gpu",
        "rpc_layer",
    ]
    found = kind({"chief": 1}, 8888, 0, 0, 1, False, "grpc", environ=environ)
    assert found.master() == "grpc://a:8888"
    ports = [kind(environ=environ | {"SLURM_JOB_ID": job}).master() for job in "12"]
    assert ports[0] != ports[1]


@row(OTHER, "`tf.distribute.cluster_resolver.UnionResolver`")
def _() -> None:
    resolvers = uo.cluster_resolver
    assert resolvers.UnionResolver is resolvers.UnionClusterResolver
    one = resolvers.SimpleClusterResolver({"worker": ["a:1"]})
    other = resolvers.SimpleClusterResolver({"worker": ["b:1"]})
    assert resolvers.UnionResolver(one, other).cluster_spec().num_tasks("worker") == 2


@row(OTHER, "`tf.train.ClusterSpec(")
def _() -> None:
    spec = uo.cluster_resolver.ClusterSpec({"worker": {1: "host1:2222"}})
    assert spec.as_dict() == {"worker": {1: "host1:2222"}}
    resolver = uo.cluster_resolver.SimpleClusterResolver(spec)
    resolver.task_type, resolver.task_id = "worker", 1
    with pytest.raises(uo.errors.ClusterError, match="List every task"):
        uo.MultiWorkerMirroredStrategy(resolver)


@row(OTHER, "`tf.contrib.distribute.MirroredStrategy(")
def _() -> None:
    assert names(contrib.MirroredStrategy) == [
        "devices",
        "num_gpus",
        "num_gpus_per_worker",
        "cross_device_ops",
        "auto_shard_dataset",
        "cross_tower_ops",
    ]
    strategy = kept(contrib.MirroredStrategy(PAIR))
    batches = [torch.zeros(2), torch.ones(2)]
    assert plain(strategy.make_dataset_iterator(batches).get_next()) == [[0, 0], [1, 1]]


@row(OTHER, "`tf.contrib.distribute.OneDeviceStrategy`")
def _() -> None:
    assert older("OneDeviceStrategy") is uo.OneDeviceStrategy
    assert older("DistributionStrategy") is uo.Strategy
    assert older("DistributionStrategyExtended") is uo.StrategyExtended
    assert older("ReplicaContext") is uo.ReplicaContext


@row(OTHER, "`AllReduceCrossTowerOps`")
def _() -> None:
    value = pr(1, 2)
    for name in ("AllReduceCrossTowerOps", "ReductionToOneDeviceCrossTowerOps"):
        assert is_mirrored(older(name)().reduce(OLD_SUM, value, "cpu:0"), 3)
        assert pair(cross_device_ops=older(name)()).reduce("SUM", value).item() == 3
    device_ops = older("ReductionToOneDeviceCrossDeviceOps")()
    assert is_mirrored(device_ops.reduce(SUM, value, "cpu:0"), 3)
    assert issubclass(type(device_ops), older("CrossDeviceOps"))
    assert pair(cross_device_ops=device_ops).reduce("SUM", value).item() == 3


@row(OTHER, "`get_tower_context()`")
def _() -> None:
    get_tower_context, kind = older("get_tower_context"), older("TowerContext")

    def merge(strategy: uo.Strategy, value: Any, times: int) -> Any:
        return strategy.reduce("SUM", value) * times

    def step() -> Any:
        tower = get_tower_context()
        assert isinstance(tower, kind)
        own = torch.tensor(tower.tower_id)
        return tower.merge_call(merge, own, times=2)

    assert plain(pair().run(step)) == 2


@row(OTHER, "`get_cross_tower_context`")
def _() -> None:
    strategy = pair()
    outside = uo.get_replica_context()
    for name in ("get_cross_tower_context", "get_cross_replica_context"):
        assert older(name)() is None
        with strategy.scope():
            assert older(name)() is strategy
    for name in ("require_tower_context", "require_replica_context"):
        older(name)(outside)
        with strategy.scope(), pytest.raises(ContextError):
            older(name)(outside)
    with strategy.scope():
        assert older("get_distribution_strategy")() is strategy
        assert older("has_distribution_strategy")()


@row(OTHER, "`get_loss_reduction()`")
def _() -> None:
    with pair(reduce_gradients=SUM).scope():
        assert older("get_loss_reduction")() is SUM


@row(OTHER, "`Step`, `StandardInputStep`")
def _() -> None:
    for op, grad in ((MEAN, 1.5), (SUM, 3.0)):
        strategy = pair(reduce_gradients=op)
        with strategy.scope():
            variable = uo.Variable(0.0)
            optimizer = sgd([variable])

        def loss_fn(_: Any, x: Any, trained: Any = variable) -> Any:
            return (trained * x).sum()

        def batches() -> Any:
            return [torch.ones(1), 2 * torch.ones(1)]

        step = contrib.StandardSingleLossStep(batches, loss_fn, optimizer, strategy)
        assert isinstance(step, contrib.StandardInputStep)
        assert isinstance(step, contrib.Step)
        contrib.Monitor(step).run_steps()
        assert variable.item() == -grad


@row(OTHER, "`DistributeConfig`")
def _() -> None:
    strategy = pair()
    config = contrib.DistributeConfig(strategy, eval_distribute=strategy)
    assert tuple(config) == (strategy, strategy, None)


@row(OTHER, "`strategy.reduce(aggregation, value, destinations)`")
def _() -> None:
    with pytest.warns(DeprecationWarning, match="older form"):
        assert is_mirrored(pair().reduce(OLD_SUM, pr(1, 2), "cpu:0"), 3)


@row(OTHER, "`strategy.broadcast(")
def _() -> None:
    with pytest.warns(DeprecationWarning, match="is an older"):
        assert is_mirrored(pair().broadcast(torch.tensor(7)), 7, 7)


@row(OTHER, "`strategy.batch_reduce(")
def _() -> None:
    with pytest.warns(DeprecationWarning, match="is an older"):
        assert is_mirrored(pair().batch_reduce(OLD_SUM, [(pr(1, 2), ["cpu:0"])])[0], 3)


@row(OTHER, "`strategy.distribute_dataset(dataset_fn)`")
def _() -> None:
    with pytest.warns(DeprecationWarning, match="is an older"):
        dataset = pair().distribute_dataset(lambda: [torch.zeros(2), torch.ones(2)])
    assert plain(dataset.make_one_shot_iterator().get_next()) == [[0, 0], [1, 1]]


@row(OTHER, "`strategy.call_for_each_tower(")
def _() -> None:
    strategy = pair()
    with strategy.scope():
        variable = uo.Variable(1.0, aggregation=OLD_MEAN)

    def older_name(name: str) -> Any:
        with pytest.warns(DeprecationWarning, match="is an older name"):
            return getattr(strategy, name)

    index = older_name("worker_device_index")
    call = older_name("call_for_each_tower")
    assert plain(call(lambda i, x: i + x, index, x=1)) == [1, 2]
    assert (older_name("num_towers"), older_name("is_single_tower")) == (2, False)
    older_name("update")(variable, lambda own, x: own.assign_add(x), 2.0)
    assert older_name("read_var")(variable).item() == 3
    older_name("update_non_slot")(older_name("worker_devices"), lambda: None)
    assert strategy.unwrap(5) == (5,)


@row(OTHER, "`experimental_run_v2`")
def _() -> None:
    with pytest.warns(DeprecationWarning, match=r"write `strategy\.run`"):
        assert pair().experimental_run_v2(lambda x: x, (1,)) == 1


@row(OTHER, "`tf.distribute.experimental.PreemptionCheckpointHandler(")
@row(OTHER, "`tf.distribute.experimental.TerminationConfig(")
@row(OTHER, "`tf.train.Checkpoint(")
def _() -> None:
    # A step in which the signal comes is finished and saved, and the next handler finds it.
    strategy = pair()
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
    checkpoint = uo.experimental.Checkpoint(model=model)
    left: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        manager = uo.experimental.CheckpointManager(checkpoint, folder, max_to_keep=2)
        config = uo.experimental.TerminationConfig(
            termination_watcher_fn=signal.SIGUSR1, exit_fn=lambda: left.append("left")
        )
        handler = uo.experimental.PreemptionCheckpointHandler(
            strategy.cluster_resolver, manager, termination_config=config
        )

        def step() -> None:
            os.kill(os.getpid(), signal.SIGUSR1)

        handler.run(strategy.run, step)
        handler.close()
        assert left == ["left"]
        assert len(manager.checkpoints) == 1
        again = uo.experimental.PreemptionCheckpointHandler(
            strategy.cluster_resolver, checkpoint, folder
        )
        assert again.total_run_calls == 1
        again.close()
