"""Rows of today's cross-device operations."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import unisono as uo
from tensorflow_rows.table import (
    SUM,
    Own,
    is_mirrored,
    names,
    pair,
    plain,
    pr,
    row,
)
from unisono.errors import (
    BatchError,
    DestinationError,
    ReplicaMismatchError,
    UnisonoError,
    UnsupportedError,
)
from unisono.testing import separate_memories

OPS = "`tf.distribute.CrossDeviceOps` (2.4)"


@row(OPS, "`CrossDeviceOps()`")
def _() -> None:
    with pytest.raises(NotImplementedError, match="reduce_implementation"):
        uo.CrossDeviceOps().reduce(SUM, pr(1, 2), "cpu:0")


@row(OPS, "used by")
def _() -> None:
    ops = uo.ReductionToOneDevice()
    strategy = pair(cross_device_ops=ops)
    assert isinstance(strategy, uo.Strategy)
    assert strategy.extended.cross_device_ops is ops


@row(OPS, "`tf.distribute.ReductionToOneDevice`")
def _() -> None:
    for kind in (uo.ReductionToOneDevice, uo.NcclAllReduce, uo.HierarchicalCopyAllReduce):
        assert kind().reduce(SUM, pr(1, 2), "cpu:0").item() == 3


@row(OPS, "`reduce(")
def _() -> None:
    ops = uo.ReductionToOneDevice()
    assert names(ops.reduce) == ["reduce_op", "per_replica_value", "destinations", "options"]
    found = [ops.reduce(op, pr(2, 4), "cpu:0").item() for op in uo.ReduceOp]
    assert dict(zip(uo.ReduceOp.__members__, found, strict=True)) == {
        "SUM": 6, "MEAN": 3, "MIN": 2, "MAX": 4, "PROD": 8,
    }  # fmt: skip
    assert ops.reduce(SUM, np.float32(7), "cpu:0").item() == 7


@row(OPS, "`reduce_implementation(")
def _() -> None:
    assert pair(cross_device_ops=Own()).reduce("SUM", uo.PerReplica([1, 2])).item() == 103


@row(OPS, "`batch_reduce(")
def _() -> None:
    ops = uo.HierarchicalCopyAllReduce()
    assert ops.batch_reduce(SUM, []) == []
    mixed = [(pr(1, 2), "cpu:0"), (pr(1.5, 2.0), "cpu:1"), (pr(1, 2), pr(0, 0))]
    assert [plain(one) for one in ops.batch_reduce(SUM, mixed)] == [3, 3.5, [3, 3]]


@row(OPS, "`batch_reduce_implementation(")
def _() -> None:
    ops = Own()
    assert [r.item() for r in ops.batch_reduce(SUM, [(pr(1, 2), "cpu:0")] * 2)] == [103, 103]
    assert ops.seen == ["reduce to 1"] * 2


@row(OPS, "`broadcast(")
def _() -> None:
    assert plain(uo.CrossDeviceOps().broadcast(7, pr(0, 0))) == [7, 7]
    with pytest.raises(ReplicaMismatchError):
        uo.CrossDeviceOps().broadcast(pr(1, 2), "cpu:0")


@row(OPS, "`broadcast_implementation(")
def _() -> None:
    ops = Own()
    assert ops.broadcast(7, "cpu:0").tolist() == 7
    assert ops.seen == ["broadcast"]


@row(OPS, "`destinations`")
def _() -> None:
    strategy = pair()
    with strategy.scope():
        variable = uo.Variable(0.0)
    ops, value = uo.ReductionToOneDevice(), pr(1.0, 2.0)
    for destinations in (value, variable):
        assert is_mirrored(ops.reduce(SUM, value, destinations), 3, 3)
    assert variable.item() == 0
    for one_device in (torch.ones(1), "/cpu:1"):
        assert ops.reduce(SUM, value, one_device).item() == 3
    with pytest.raises(DestinationError):
        ops.reduce(SUM, value, ["cpu:0"])


@row(OPS, "`options`")
def _() -> None:
    options = uo.experimental.CommunicationOptions(bytes_per_pack=4)
    assert options.bytes_per_pack == 4
    pairs = [(pr(1, 2), pr(0, 0))] * 3
    results = uo.HierarchicalCopyAllReduce().batch_reduce(SUM, pairs, options)
    assert [plain(one) for one in results] == [[3, 3]] * 3
    with pytest.raises(UnsupportedError, match="bytes_per_pack"):
        uo.experimental.CommunicationOptions(bytes_per_pack=-1)


@row(OPS, "returns a `tf.Tensor`")
def _() -> None:
    ops = uo.ReductionToOneDevice()
    assert type(ops.reduce(SUM, pr(1, 2), "cpu:1")) is torch.Tensor
    assert is_mirrored(ops.reduce(SUM, pr(1, 2), pr(0, 0)), 3, 3)


@row(OPS, "`tf.distribute.StrategyExtended.reduce_to`")
def _() -> None:
    extended = pair().extended
    assert extended.reduce_to("SUM", pr(1, 2), "cpu:0").item() == 3
    assert plain(extended.batch_reduce_to("mean", [(pr(1.0, 2.0), pr(0, 0))])[0]) == [1.5, 1.5]


@row(OPS, "raises `ValueError`")
def _() -> None:
    for kind in (BatchError, DestinationError, ReplicaMismatchError, UnsupportedError):
        assert issubclass(kind, ValueError)
    ops = uo.ReductionToOneDevice()
    for call in (
        lambda: ops.batch_reduce(SUM, [[pr(1, 2), "cpu:0"]]),  # type: ignore[list-item]
        lambda: ops.reduce(SUM, pr(1, 2), None),
        lambda: ops.reduce(SUM, uo.PerReplica([torch.ones(1), torch.ones(2)]), "cpu:0"),
    ):
        with pytest.raises(ValueError, match=r"entry|got|has") as caught:
            call()
        assert isinstance(caught.value, UnisonoError)


ONE = "`tf.distribute.ReductionToOneDevice` (2.4)"


@row(ONE, "`ReductionToOneDevice`")
def _() -> None:
    assert issubclass(uo.ReductionToOneDevice, uo.CrossDeviceOps)


@row(ONE, "`reduce_to_device=None`")
def _() -> None:
    assert names(uo.ReductionToOneDevice) == ["reduce_to_device", "accumulation_fn"]
    with separate_memories():
        assert uo.ReductionToOneDevice("cpu:1").reduce(SUM, pr(1, 2), "cpu:0").item() == 3


@row(ONE, "`accumulation_fn=None`")
def _() -> None:
    seen: list[Any] = []

    def first(parts: Any) -> Any:
        seen.extend(plain(part) for part in parts)
        return parts[0]

    ops = uo.ReductionToOneDevice(accumulation_fn=first)
    assert ops.reduce(SUM, pr(1, 2, 4), "cpu:0").item() == 1
    assert seen == [1, 2, 4]


@row(ONE, "`reduce`, `batch_reduce`, `broadcast`")
def _() -> None:
    ops = uo.ReductionToOneDevice()
    assert ops.reduce(
        reduce_op=SUM, per_replica_value=pr(1, 2), destinations="cpu:0", options=None
    ).item() == 3  # fmt: skip
    pairs = [(pr(1, 2), "cpu:0")]
    found = ops.batch_reduce(reduce_op=SUM, value_destination_pairs=pairs, options=None)
    assert [one.item() for one in found] == [3]
    assert plain(ops.broadcast(tensor=7, destinations=pr(0, 0))) == [7, 7]


@row(ONE, "`tf.distribute.MirroredStrategy(")
def _() -> None:
    strategy = pair(cross_device_ops=uo.ReductionToOneDevice(accumulation_fn=lambda p: p[1]))
    assert strategy.reduce("SUM", pr(1, 2)).item() == 2


@row(ONE, "`tf.distribute.NcclAllReduce`")
def _() -> None:
    for kind in (uo.NcclAllReduce, uo.HierarchicalCopyAllReduce):
        assert inspect.signature(kind).parameters["num_packs"].default == 1
        value = pr(1, 2, 4)
        with separate_memories():
            assert plain(kind().batch_reduce(SUM, [(value, value)])[0]) == [7, 7, 7]


@row(ONE, "`StrategyExtended.reduce_to`")
def _() -> None:
    extended = pair(cross_device_ops=uo.ReductionToOneDevice()).extended
    assert is_mirrored(extended.reduce_to(SUM, pr(1, 2), pr(0, 0)), 3, 3)
    assert extended.batch_reduce_to(SUM, [(pr(1, 2), "cpu:1")])[0].item() == 3
