from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from unisono.devices import Device, Machine, default_devices, pretend, resolve, this_machine
from unisono.errors import DeviceError

CPU = torch.device("cpu")
GPUS = (torch.device("cuda", 0), torch.device("cuda", 1))


@pytest.mark.parametrize("index", [0, 1, 99])
def test_every_cpu_slot_exists_and_is_the_host(index: int) -> None:
    device = resolve(f"/cpu:{index}")

    assert device is Device("cpu", index)
    assert Machine(gpus=()).torch_device(device) == CPU


def test_slots_share_the_memory_of_the_host() -> None:
    machine = Machine(gpus=())

    assert machine.memory(Device("cpu", 0)) == machine.memory(Device("cpu", 7))


def test_slots_with_separate_memories_do_not() -> None:
    machine = Machine(gpus=(), are_shared=False)

    assert machine.memory(Device("cpu", 0)) != machine.memory(Device("cpu", 7))
    assert machine.torch_device(Device("cpu", 7)) == CPU


def test_gpu_slots_on_one_gpu_share_its_memory() -> None:
    machine = Machine(gpus=(GPUS[0], GPUS[0], GPUS[1]))
    memories = [machine.memory(Device("cuda", index)) for index in range(3)]

    assert memories == [GPUS[0], GPUS[0], GPUS[1]]


def test_a_gpu_that_is_absent_is_an_error_that_lists_those_there_are() -> None:
    with (
        pretend(gpus=GPUS),
        pytest.raises(DeviceError, match=r"no cuda:2 on this host.*cuda:0, cuda:1\."),
    ):
        resolve("/gpu:2")


def test_without_a_gpu_the_error_says_so() -> None:
    with pretend(gpus=()), pytest.raises(DeviceError, match=r"no cuda:0 .* has no GPU"):
        resolve("cuda:0")


def test_the_default_devices_are_all_gpus_or_one_cpu() -> None:
    with pretend(gpus=GPUS):
        assert default_devices() == (Device("cuda", 0), Device("cuda", 1))
    with pretend(gpus=()):
        assert default_devices() == (Device("cpu", 0),)


def test_a_pretended_machine_ends_with_its_block_even_after_an_error() -> None:
    real = this_machine()

    with pytest.raises(KeyError), pretend(gpus=GPUS):
        raise KeyError

    assert this_machine() == real


def test_blocks_nest_and_keep_what_the_outer_one_changed() -> None:
    with pretend(gpus=GPUS):
        with pretend(are_shared=False):
            assert this_machine() == Machine(GPUS, are_shared=False)
        assert this_machine() == Machine(GPUS)


def test_other_threads_see_the_pretended_machine() -> None:
    with pretend(gpus=GPUS) as machine, ThreadPoolExecutor(1) as pool:
        assert pool.submit(this_machine).result() == machine
