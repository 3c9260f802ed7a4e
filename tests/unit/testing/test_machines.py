import pytest
import torch

from unisono.devices import Device, cpu_slots, pretend, resolve, this_machine
from unisono.errors import DeviceError
from unisono.testing import separate_memories, virtual_gpus


def test_slots_share_a_memory_but_not_within_the_block() -> None:
    assert num_memories() == 1
    with separate_memories():
        assert num_memories() == 3
    assert num_memories() == 1


def test_virtual_gpus_are_spread_over_the_real_ones() -> None:
    with pretend(gpus=(torch.device("cuda", 0), torch.device("cuda", 1))), virtual_gpus(5):
        behind = [this_machine().torch_device(resolve(f"/gpu:{i}")).index for i in range(5)]

    assert behind == [0, 1, 0, 1, 0]


def test_virtual_gpus_may_be_fewer_than_the_real_ones() -> None:
    with pretend(gpus=(torch.device("cuda", 0), torch.device("cuda", 1))), virtual_gpus(1):
        assert resolve("/gpu:0") is Device("cuda", 0)
        with pytest.raises(DeviceError, match="no cuda:1"):
            resolve("/gpu:1")


def test_virtual_gpus_need_a_gpu_and_say_what_to_use_instead() -> None:
    with pretend(gpus=()), pytest.raises(DeviceError, match=r"2 virtual GPUs.*'cpu:0', 'cpu:1'"):
        virtual_gpus(2)


def num_memories() -> int:
    return len({this_machine().memory(device) for device in cpu_slots(3)})
