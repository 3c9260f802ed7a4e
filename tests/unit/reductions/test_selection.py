import pytest
import torch

import unisono as uo
from unisono.devices import pretend
from unisono.errors import DeviceError
from unisono.reductions import select_cross_device_ops

GPUS = tuple(torch.device("cuda", i) for i in range(4))


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_cpu_slots_reduce_on_one_device(num_devices: int) -> None:
    chosen = select_cross_device_ops([f"/cpu:{i}" for i in range(num_devices)])

    assert type(chosen) is uo.ReductionToOneDevice


@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_different_gpus_use_nccl(num_devices: int) -> None:
    with pretend(gpus=GPUS):
        chosen = select_cross_device_ops([f"/gpu:{i}" for i in range(num_devices)])

    assert type(chosen) is uo.NcclAllReduce


@pytest.mark.parametrize("devices", [["/gpu:0"], ["/gpu:0", "/cpu:0"], ["/gpu:0", "/gpu:0"]])
def test_one_gpu_or_a_mixture_reduces_on_one_device(devices: list[str]) -> None:
    with pretend(gpus=GPUS):
        assert type(select_cross_device_ops(devices)) is uo.ReductionToOneDevice


def test_slots_on_one_gpu_reduce_on_one_device() -> None:
    with pretend(gpus=GPUS[:1] * 4):
        chosen = select_cross_device_ops([f"/gpu:{i}" for i in range(4)])

    assert type(chosen) is uo.ReductionToOneDevice


def test_a_device_that_is_absent_is_refused() -> None:
    with pretend(gpus=GPUS[:1]), pytest.raises(DeviceError, match="no cuda:1"):
        select_cross_device_ops(["/gpu:0", "/gpu:1"])
