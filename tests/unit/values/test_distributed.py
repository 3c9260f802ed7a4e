import pickle
from typing import Any

import pytest
import torch

from unisono.devices import Device, cpu_slots, pretend
from unisono.errors import DeviceError, ReplicaMismatchError, UnsupportedError
from unisono.values import DistributedValues, Mirrored, PerReplica

each_class = pytest.mark.parametrize("container", [DistributedValues, PerReplica, Mirrored])


@each_class
def test_values_are_a_tuple_by_replica_id(container: type[DistributedValues]) -> None:
    parts = [torch.tensor(10.0**i) for i in range(3)]

    value = container(parts)

    assert isinstance(value.values, tuple)
    assert all(a is b for a, b in zip(value.values, parts, strict=True))


@each_class
def test_components_without_a_device_sit_on_slots(container: type[DistributedValues]) -> None:
    assert container([torch.ones(1), 2.0, [3]]).devices == cpu_slots(3)


def test_devices_are_read_in_any_spelling() -> None:
    value = PerReplica([1, 2, 3], devices=["/cpu:2", torch.device("cpu"), Device("cpu", 1)])

    assert value.devices == (Device("cpu", 2), Device("cpu", 0), Device("cpu", 1))


def test_any_iterable_of_values_will_do() -> None:
    assert PerReplica(10**i for i in range(3)).values == (1, 10, 100)


def test_a_value_may_have_no_component() -> None:
    assert PerReplica([]).values == ()
    assert PerReplica([]).devices == ()


@pytest.mark.parametrize("devices", [[], ["/cpu:0"], ["/cpu:0", "/cpu:1", "/cpu:2"]])
def test_another_number_of_devices_is_refused(devices: list[str]) -> None:
    with pytest.raises(ReplicaMismatchError, match=f"2 values and {len(devices)} devices"):
        PerReplica([1, 2], devices=devices)


def test_a_device_that_is_absent_is_refused() -> None:
    with pretend(gpus=()), pytest.raises(DeviceError, match="no cuda:0"):
        PerReplica([1], devices=["/gpu:0"])


def test_replicas_may_share_a_device() -> None:
    assert PerReplica([1, 2], devices=["/cpu:0", "/cpu:0"]).devices == (Device("cpu", 0),) * 2


def test_the_text_has_a_line_for_each_replica() -> None:
    value = Mirrored([1.5, "two"], devices=["/cpu:0", "/cpu:3"])

    assert repr(value) == "Mirrored:\n  0 on cpu:0: 1.5\n  1 on cpu:3: 'two'"


def test_values_and_devices_cannot_be_replaced() -> None:
    value = PerReplica([1, 2])

    with pytest.raises(AttributeError):
        value.values = (3, 4)  # type: ignore[misc]
    with pytest.raises(AttributeError):
        value.devices = cpu_slots(2)  # type: ignore[misc]


def test_per_replica_and_mirrored_are_different_things() -> None:
    assert not isinstance(Mirrored([1]), PerReplica)
    assert not isinstance(PerReplica([1]), Mirrored)


def test_a_value_can_be_pickled() -> None:
    value = pickle.loads(pickle.dumps(PerReplica([1, 2], devices=["/cpu:4", "/cpu:5"])))

    assert type(value) is PerReplica
    assert value.values == (1, 2)
    assert value.devices == (Device("cpu", 4), Device("cpu", 5))


@pytest.mark.gpu
def test_a_cuda_tensor_sits_on_its_own_device() -> None:
    value = PerReplica([torch.ones(1, device="cuda:0"), torch.ones(1)])

    assert value.devices == (Device("cuda", 0), Device("cpu", 1))


def test_backward_outside_a_run_belongs_into_the_step() -> None:
    losses: Any = PerReplica((torch.ones(()), torch.ones(())))

    with pytest.raises(UnsupportedError, match=r"in the function that you `run`"):
        losses.backward()
    assert not hasattr(losses, "backward")
