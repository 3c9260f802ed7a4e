import logging
from typing import Any

import pytest
import torch

import unisono as uo

SUM = uo.ReduceOp.SUM


def powers(num_replicas: int = 3) -> uo.PerReplica:
    return uo.PerReplica([torch.tensor([10.0**i]) for i in range(num_replicas)])


@pytest.mark.usefixtures("path", "memories")
def test_where_nccl_cannot_run_the_values_meet_on_one_device() -> None:
    ops, value = uo.NcclAllReduce(), powers()

    for _ in range(2):
        results: list[Any] = ops.batch_reduce(SUM, [(value, value)])
        results.append(ops.reduce(SUM, value, value))

        for result in results:
            assert [part.tolist() for part in result.values] == [[111]] * 3


@pytest.mark.usefixtures("path", "memories")
def test_the_log_says_once_why_nccl_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    ops, value = uo.NcclAllReduce(), powers()

    with caplog.at_level(logging.INFO, logger="unisono"):
        for _ in range(3):
            ops.reduce(SUM, value, value)
            ops.batch_reduce(SUM, [(value, value), (value, "/cpu:0")])

    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == (
        "NcclAllReduce reduces on one device instead of through NCCL: the values are on cpu:0, "
        "cpu:1, cpu:2."
    )


def test_an_empty_batch_has_nothing_to_say(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="unisono"):
        assert uo.NcclAllReduce().batch_reduce(SUM, []) == []

    assert caplog.records == []


@pytest.mark.gpu
def test_slots_on_one_gpu_fall_back_and_say_why(caplog: pytest.LogCaptureFixture) -> None:
    with uo.testing.virtual_gpus(3), caplog.at_level(logging.INFO, logger="unisono"):
        value = uo.PerReplica(
            [torch.tensor([10.0**i], device="cuda:0") for i in range(3)],
            devices=["/gpu:0", "/gpu:1", "/gpu:2"],
        )
        result: Any = uo.NcclAllReduce().reduce(SUM, value, value)

    assert [part.tolist() for part in result.values] == [[111]] * 3
