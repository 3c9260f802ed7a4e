import ctypes
import logging
import threading
from typing import Any, NoReturn

import pytest
import torch

import unisono as uo
from unisono.communicators import NcclGroup, nccl_group
from unisono.errors import CommunicationError
from unisono.reductions import nccl

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


DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (10_001,)], ids=str)
def test_a_group_of_one_gpu_gives_what_it_was_given(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    group = NcclGroup([0])
    given = (torch.randn(shape, device="cuda") * 9).to(dtype)

    for _ in range(2):
        total = torch.zeros_like(given)
        group.all_reduce(SUM, [given], [total])
        assert torch.equal(total, given)

    group.close()
    group.close()


@pytest.mark.gpu
def test_two_threads_may_use_two_groups_of_the_same_gpu() -> None:
    groups = [NcclGroup([0]) for _ in range(2)]
    totals = [torch.zeros(1000, device="cuda") for _ in groups]

    def use(i: int) -> None:
        for _ in range(50):
            groups[i].all_reduce(SUM, [torch.ones(1000, device="cuda")], [totals[i]])

    threads = [threading.Thread(target=use, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert [float(total.sum()) for total in totals] == [1000.0, 1000.0]
    for group in groups:
        group.close()


@pytest.mark.gpu
def test_gpus_that_do_not_exist_are_refused_in_words() -> None:
    expected = r"could not connect the GPUs 0, 99: this process sees"
    with pytest.raises(CommunicationError, match=expected):
        NcclGroup([0, 99])


@pytest.mark.gpu
def test_the_groups_of_an_operation_are_kept_until_it_is_closed() -> None:
    ops = uo.NcclAllReduce()

    group = ops._group((0,))
    assert ops._group((0,)) is group
    ops.close()
    again = ops._group((0,))

    assert again is not None
    assert again is not group
    ops.close()


def test_a_missing_library_is_an_error_with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> NoReturn:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    nccl_group._library.cache_clear()

    with pytest.raises(CommunicationError, match=r"NCCL library cannot .*libnccl\.so\.2"):
        NcclGroup([0, 1])


def test_where_nccl_fails_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(name: str) -> NoReturn:
        raise OSError("no such file")

    monkeypatch.setattr(ctypes, "CDLL", failing)
    nccl_group._library.cache_clear()
    # CPU replicas with memories of their own stand in for GPUs, up to the point where NCCL begins.
    monkeypatch.setattr(nccl, "_why_not", lambda op, pack: None)
    ops, value = uo.NcclAllReduce(), powers()

    with caplog.at_level(logging.WARNING, logger="unisono"), uo.testing.separate_memories():
        for _ in range(2):
            result: Any = ops.reduce(SUM, value, value)
            assert [part.tolist() for part in result.values] == [[111]] * 3

    (record,) = caplog.records
    assert "NCCL library cannot be loaded" in record.getMessage()
