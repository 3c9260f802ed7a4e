import pytest
import torch

import unisono as uo
from unisono.contrib import PerDevice
from unisono.devices import Device
from unisono.errors import DeviceError


def test_a_mapping_gives_devices_and_values_in_its_order() -> None:
    value = PerDevice({"/cpu:3": 1.0, torch.device("cpu"): 10.0, Device("cpu", 1): 100.0})

    assert value.values == (1, 10, 100)
    assert value.devices == (Device("cpu", 3), Device("cpu", 0), Device("cpu", 1))


def test_it_is_a_per_replica() -> None:
    value = PerDevice({"/cpu:0": 1.0, "/cpu:1": 10.0})

    assert isinstance(value, uo.PerReplica)
    assert uo.ReductionToOneDevice().reduce(uo.ReduceOp.SUM, value, "/cpu:0") == 11


def test_a_name_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(DeviceError):
        PerDevice({"tower_0": 1.0})
