"""Rows of what is missing, of what is general, and of bugs that are fixed here."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from on_replica import replica as context
from on_replica import replica_id as own_id
from worker_threads import on_strategies

import unisono as uo
from tensorflow_rows.table import (
    OLD_SUM,
    ON_READ,
    SUM,
    is_mirrored,
    names,
    num_records,
    pair,
    plain,
    pr,
    row,
    sgd,
)
from unisono import contrib
from unisono.errors import (
    ContextError,
    DeviceError,
    UnsupportedError,
)
from unisono.testing import separate_memories

MISSING = "What is not available"


@row(MISSING, "`ParameterServerStrategy`")
def _() -> None:
    for name in (
        "ParameterServerStrategy",
        "TPUStrategy",
        "MultiWorkerAllReduce",
        "run_standard_tensorflow_server",
    ):
        with pytest.raises(UnsupportedError, match=r"[Uu]se `unisono|unisono launch"):
            getattr(contrib, name)()


def are_missing(thing: Any, *missing: str) -> None:
    for name in missing:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not hasattr(thing, name)


@row(MISSING, "`tf.distribute.ParameterServerStrategy`")
def _() -> None:
    are_missing(uo, "ParameterServerStrategy", "TPUStrategy", "Server", "coordinator")
    are_missing(uo.experimental, "CentralStorageStrategy")
    are_missing(uo.cluster_resolver, "TPUClusterResolver", "GCEClusterResolver")


@row(MISSING, "`strategy.group`")
def _() -> None:
    are_missing(pair(), "group", "map")


@row(MISSING, "`tf.distribute.experimental_set_strategy`")
def _() -> None:
    are_missing(uo, "experimental_set_strategy")


@row(MISSING, "`tf.contrib.distribute.UpdateContext`")
def _() -> None:
    are_missing(contrib, "UpdateContext", "initialize_tpu_system")


GENERAL = "In general"


class Exported:
    """Has `__dlpack__`, and nothing else."""

    def __dlpack__(self, **options: Any) -> Any:
        return torch.ones(1).__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.ones(1).__dlpack_device__()


@row(GENERAL, "`tf.Tensor`")
def _() -> None:
    ops = uo.ReductionToOneDevice()
    for given in (torch.ones(1), np.ones(1), 1, [1.0], Exported()):
        assert ops.reduce(SUM, given, "cpu:0").sum().item() == 1


@row(GENERAL, "`tf.IndexedSlices`")
def _() -> None:
    parts = [
        torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([float(i)]), (3,)) for i in (2, 3)
    ]
    total = pair().reduce("SUM", uo.PerReplica(parts))
    assert total._values().tolist() == [2, 3]
    assert not total.is_coalesced()


@row(GENERAL, "`/gpu:0`, `GPU:0`")
def _() -> None:
    from unisono.devices import resolve

    assert {str(resolve(name)) for name in ("/cpu:1", "CPU:1", "cpu:1")} == {"cpu:1"}
    of_task = resolve("/job:worker/task:1/device:CPU:1")
    assert str(of_task) == "/job:worker/task:1/device:cpu:1"
    for name in ("/gpu:99", "GPU:99", "/job:worker/task:1/device:GPU:99", "cuda:99"):
        with pytest.raises(DeviceError, match="cuda:99 on this host"):
            resolve(name)


@row(GENERAL, "logical CPU devices")
def _() -> None:
    assert pair(5).num_replicas_in_sync == 5


@row(GENERAL, "`PerReplica`, `Mirrored`")
def _() -> None:
    assert names(uo.PerReplica) == ["values", "devices"]


@row(GENERAL, "a `Mirrored` has a tensor's operators")
def _() -> None:
    mirrored, value = uo.Mirrored([torch.tensor(1), torch.tensor(2)]), pr(1, 2)
    assert (mirrored + 1).item() == 2
    with pytest.raises(UnsupportedError):
        value + 1
    with pytest.raises(UnsupportedError):
        torch.add(value, 1)  # type: ignore[call-overload]
    assert plain(pair().run(lambda: torch.add(mirrored, value))) == [2, 4]  # type: ignore[call-overload]


@row(GENERAL, "one destination gives a tensor")
def _() -> None:
    assert type(uo.ReductionToOneDevice().reduce(SUM, pr(1, 2), "cpu:0")) is torch.Tensor
    assert is_mirrored(contrib.AllReduceCrossDeviceOps().reduce(SUM, pr(1, 2), "cpu:0"), 3)


@row(GENERAL, "`tf.Variable` in a scope")
def _() -> None:
    strategy = pair()
    with strategy.scope():
        variable = uo.Variable(1.0)
        optimizer = sgd([variable])

    def step() -> None:
        (variable * (1.0 + own_id())).backward()
        optimizer.step()

    strategy.run(step)
    assert variable.item() == -0.5


@row(GENERAL, "a variable made outside")
def _() -> None:
    variable, strategy = uo.Variable(1.0), pair()
    with strategy.scope():
        variable.assign_add(1.0)
    assert variable.item() == 2
    with pytest.raises(ContextError):
        strategy.run(lambda: variable.assign_add(1.0))


@row(GENERAL, "`strategy.run` in a `merge_call`")
def _() -> None:
    def merge(strategy: uo.Strategy, value: Any) -> Any:
        return strategy.run(lambda own: own + own_id(), (value,))

    found = pair().run(lambda: context().merge_call(merge, (torch.tensor(10 * own_id()),)))
    assert plain(found) == [0, 11]


@row(GENERAL, "`ReduceOp.SUM`, `MEAN`")
def _() -> None:
    assert list(uo.ReduceOp.__members__) == ["SUM", "MEAN", "MIN", "MAX", "PROD"]


@row(GENERAL, "a mean of int32")
def _() -> None:
    for dtype, result in ((torch.int32, torch.float64), (torch.int8, torch.float32)):
        mean = pair().reduce("MEAN", pr(1, 2, dtype=dtype))
        assert (mean.item(), mean.dtype) == (1.5, result)


@row(GENERAL, "an element of an iterator")
def _() -> None:
    batches = [torch.ones(2)]
    kinds = [type(next(iter(pair(n).experimental_distribute_dataset(batches)))) for n in (1, 2)]
    assert kinds == [torch.Tensor, uo.PerReplica]
    assert on_strategies(
        2, lambda s: type(iter(s.experimental_distribute_dataset(batches)).get_next())
    ) == [uo.PerReplica] * 2  # fmt: skip


@row(GENERAL, "`experimental_distribute_values_from_function`")
def _() -> None:
    found = pair().experimental_distribute_values_from_function(lambda _: (1, {"a": [2]}))
    assert (found[0].values, found[1]["a"][0].values) == ((1, 1), (2, 2))


BUGS = "TensorFlow bugs fixed here"


@row(BUGS, "the hierarchical copy drops")
def _() -> None:
    value = pr(1, 2, 4)
    with separate_memories():
        assert is_mirrored(uo.HierarchicalCopyAllReduce().reduce(SUM, value, value), 7, 7, 7)


@row(BUGS, "an empty batch")
def _() -> None:
    assert uo.HierarchicalCopyAllReduce().batch_reduce(SUM, []) == []
    assert pair().extended.batch_reduce_to("SUM", []) == []


@row(BUGS, "values of two dtypes")
def _() -> None:
    pairs = [(pr(1, 2), pr(0, 0)), (pr(1.5, 2.0), pr(0, 0))]
    found: Any = uo.HierarchicalCopyAllReduce(num_packs=1).batch_reduce(SUM, pairs)
    assert [one.values[0].dtype for one in found] == [torch.int64, torch.float32]


@row(BUGS, "devices in another order")
def _() -> None:
    other = uo.PerReplica([0, 0], ["cpu:1", "cpu:0"])
    found: Any = uo.HierarchicalCopyAllReduce().batch_reduce(SUM, [(pr(1, 2), other)])[0]
    assert found.devices == other.devices


@row(BUGS, "an unknown `all_reduce_alg`")
def _() -> None:
    with pytest.raises(ValueError, match="'nccl' or 'hierarchical_copy'"):
        contrib.AllReduceCrossDeviceOps("x")
    with pytest.raises(ValueError, match=r"ReduceOp\.SUM, MEAN"):
        uo.HierarchicalCopyAllReduce().reduce("x", pr(1, 2), "cpu:0")


@row(BUGS, "NCCL without GPUs")
def _() -> None:
    assert num_records(uo.NcclAllReduce()) == 1


@row(BUGS, "an absent GPU")
def _() -> None:
    with pytest.raises(ValueError, match="no cuda:99 on this host"):
        uo.ReductionToOneDevice().reduce(SUM, pr(1, 2), "/gpu:99")


@row(BUGS, "a mean of integers")
def _() -> None:
    for num_replicas in (1, 2):
        value = pr(*[3] * num_replicas)
        assert pair(num_replicas).reduce("MEAN", value).dtype == torch.float64


@row(BUGS, "broadcasting a `PerReplica`")
def _() -> None:
    with pytest.raises(ValueError, match="Only one tensor can be broadcast"):
        uo.ReductionToOneDevice().broadcast(pr(1, 2), "cpu:0")


@row(BUGS, "sums depend on the algorithm")
def _() -> None:
    torch.manual_seed(0)
    value = uo.PerReplica([torch.randn(1000) for _ in range(5)])
    kinds = (uo.ReductionToOneDevice(), *(uo.HierarchicalCopyAllReduce(n) for n in (0, 1, 3)))
    results: list[Any] = [ops.batch_reduce(SUM, [(value, value)])[0] for ops in kinds]
    found = [result.values[0] for result in results]
    assert all(torch.equal(found[0], other) for other in found)


@row(BUGS, "two int32 values")
def _() -> None:
    def step() -> Any:
        one = torch.tensor(1, dtype=torch.int32)
        return context().all_reduce("SUM", [one, one, one * 1.5])

    assert [plain(part) for part in pair().run(step)] == [[2, 2], [2, 2], [3, 3]]


def on_read(value: Any, aggregation: Any, strategy: uo.Strategy) -> uo.Variable:
    with strategy.scope():
        return uo.Variable(value, synchronization=ON_READ, aggregation=aggregation)


@row(BUGS, "an ON_READ sum of 2 replicas")
def _() -> None:
    variable = on_read(0, OLD_SUM, pair())
    with pytest.raises(ValueError, match=r"use `load\(\)`"):
        variable.assign(7)
    variable.load(7)
    assert [plain(part) for part in variable.values] == [4, 3]


@row(BUGS, "a reduction of Python's `0`")
def _() -> None:
    assert pair().extended.reduce_to("SUM", 0, "cpu:0").item() == 0


@row(BUGS, "a list as `axis`")
def _() -> None:
    assert pair().reduce("SUM", pr([[1, 2]], [[3, 4]]), axis=[0, 1]).item() == 10


@row(BUGS, "a negative `axis` of `gather`")
def _() -> None:
    assert pair().gather(pr([[1, 2]], [[3, 4]]), axis=-1).tolist() == [[1, 2, 3, 4]]


@row(BUGS, "a gather of unequal shapes")
def _() -> None:
    strategy = pair()
    with pytest.raises(ValueError, match="replica 1 has"):
        strategy.gather(uo.PerReplica([torch.ones(2, 2), torch.ones(2, 3)]), axis=0)
    assert strategy.gather(pr([1], [2]), axis=0).tolist() == [1, 2]


@row(BUGS, "assigning a `PerReplica`")
def _() -> None:
    strategy = pair()
    with strategy.scope():
        variable = uo.Variable(0.0)
        with pytest.raises(ValueError, match="one value for all replicas"):
            variable.assign(pr(1.0, 2.0))


@row(BUGS, "without aggregation, an ON_READ")
def _() -> None:
    variable = on_read(0.0, uo.VariableAggregation.NONE, pair())
    with pytest.raises(ValueError, match="nothing was written"):
        variable.assign(1.0)
    assert [plain(part.detach()) for part in variable.values] == [0, 0]
