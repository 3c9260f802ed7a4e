from typing import Any

import pytest
import torch

from unisono.devices import Device, cpu_slots, pretend
from unisono.errors import DestinationError, DeviceError
from unisono.reductions import Destinations, destinations_of
from unisono.values import Mirrored, PerReplica


@pytest.mark.parametrize(
    ("destinations", "devices"),
    [
        ("/cpu:2", (Device("cpu", 2),)),
        ("cpu", (Device("cpu", 0),)),
        (Device("cpu", 3), (Device("cpu", 3),)),
        (torch.device("cpu", 1), (Device("cpu", 1),)),
        (torch.zeros(3), (Device("cpu", 0),)),
        (torch.nn.Parameter(torch.zeros(3)), (Device("cpu", 0),)),
        (torch.eye(2).to_sparse(), (Device("cpu", 0),)),
        (PerReplica([1.0, 2.0, 3.0]), cpu_slots(3)),
        (Mirrored([1.0], devices=["/cpu:4"]), (Device("cpu", 4),)),
        (Mirrored([1, 1], devices=["/cpu:5", "/cpu:1"]), (Device("cpu", 5), Device("cpu", 1))),
        (Destinations(cpu_slots(2)), cpu_slots(2)),
    ],
    ids=repr,
)
def test_what_names_devices_is_a_destination(
    destinations: Any, devices: tuple[Device, ...]
) -> None:
    assert destinations_of(destinations).devices == devices


@pytest.mark.parametrize("wrong", [None, "", 0, ["/cpu:0"], ("/cpu:0", "/cpu:1"), {}], ids=repr)
def test_what_names_no_device_is_refused_and_shown(wrong: Any) -> None:
    with pytest.raises(DestinationError) as caught:
        destinations_of(wrong)

    assert f"got {wrong!r} of type {type(wrong).__name__}" in str(caught.value)


def test_a_value_without_components_is_refused() -> None:
    with pytest.raises(DestinationError, match="without components"):
        destinations_of(PerReplica([]))


def test_a_name_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(DeviceError, match="Cannot read 'tpu:0'"):
        destinations_of("/tpu:0")


def test_a_gpu_that_is_absent_is_refused() -> None:
    with pretend(gpus=()), pytest.raises(DeviceError, match="no cuda:0"):
        destinations_of("/gpu:0")
