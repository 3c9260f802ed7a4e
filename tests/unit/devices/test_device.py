import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from unisono.devices import Device, cpu_slots
from unisono.errors import DeviceError

WORKER = "/job:worker/task:1/device:"


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("cpu", "cpu:0"),
        ("cpu:3", "cpu:3"),
        ("CPU:3", "cpu:3"),
        ("/cpu:3", "cpu:3"),
        ("/CPU:3", "cpu:3"),
        ("/device:CPU:3", "cpu:3"),
        ("device:cpu:3", "cpu:3"),
        ("cuda", "cuda:0"),
        ("cuda:1", "cuda:1"),
        ("cuda:1#0", "cuda:1"),
        ("/gpu:1#2", "cuda:1#2"),
        ("/job:worker/task:1/device:GPU:2#3", f"{WORKER}cuda:2#3"),
        ("gpu:1", "cuda:1"),
        ("GPU:1", "cuda:1"),
        ("/gpu:1", "cuda:1"),
        ("/GPU:1", "cuda:1"),
        ("/device:GPU:1", "cuda:1"),
        ("/replica:0/device:GPU:1", "cuda:1"),
        ("/job:worker/task:1/device:CPU:0", f"{WORKER}cpu:0"),
        ("/job:worker/task:1/cpu:2", f"{WORKER}cpu:2"),
        ("/job:worker/replica:0/task:1/device:GPU:2", f"{WORKER}cuda:2"),
        ("/task:1/job:worker/gpu:2", f"{WORKER}cuda:2"),
        ("/job:worker/task:1", f"{WORKER}cpu:0"),
        ("/job:worker", "/job:worker/task:0/device:cpu:0"),
    ],
)
def test_a_spelling_of_tensorflow_or_torch_is_read(spelling: str, name: str) -> None:
    assert repr(Device.parse(spelling)) == name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        (torch.device("cpu"), "cpu:0"),
        (torch.device("cpu", 2), "cpu:2"),
        (torch.device("cuda"), "cuda:0"),
        (torch.device("cuda", 3), "cuda:3"),
        (Device("cuda", 3), "cuda:3"),
    ],
)
def test_a_device_object_is_read(spelling: object, name: str) -> None:
    assert repr(Device.parse(spelling)) == name


@pytest.mark.parametrize(
    "wrong",
    ["", "/", "weird:0", "cpu:x", "cpu:-1", "cpu:0:1", "cpu 0", "/cpu:0/gpu:0", "/job:/cpu:0"],
)
def test_a_name_that_cannot_be_read_is_refused_and_shown(wrong: str) -> None:
    with pytest.raises(DeviceError, match="Cannot read") as caught:
        Device.parse(wrong)

    assert repr(wrong) in str(caught.value)


def test_a_task_without_a_job_is_refused() -> None:
    with pytest.raises(DeviceError, match="'/task:1/cpu:0' has a task but no job"):
        Device.parse("/task:1/cpu:0")


@pytest.mark.parametrize("wrong", [None, 0, ["cpu:0"], ("cpu:0",), torch.zeros(1)])
def test_what_is_no_name_is_refused_with_its_type(wrong: object) -> None:
    with pytest.raises(DeviceError, match=f"of type {type(wrong).__name__}"):
        Device.parse(wrong)


def test_the_default_fills_in_the_job_and_the_task() -> None:
    device = Device.parse("/cpu:0", default="/job:worker/task:1")

    assert repr(device) == f"{WORKER}cpu:0"


def test_the_default_gives_way_to_what_is_named() -> None:
    device = Device.parse("/job:chief/task:0/gpu:1", default="/job:worker/task:1/gpu:7")

    assert repr(device) == "/job:chief/task:0/device:cuda:1"


def test_devices_of_one_name_are_one_object() -> None:
    assert Device.parse("/gpu:1") is Device.parse("cuda:1") is Device("cuda", 1)
    assert Device("cuda", 1) is not Device("cuda", 2)
    assert Device("cpu", 1) is not Device("cpu", 1, "worker", 0)


@pytest.mark.parametrize("name", ["cpu:1", "/gpu:0", "/job:worker/task:1/gpu:0"])
def test_a_device_stays_itself_through_pickle_and_copy(name: str) -> None:
    device = Device.parse(name)

    assert pickle.loads(pickle.dumps(device)) is device
    assert copy.deepcopy(device) is device
    assert copy.copy(device) is device


def test_threads_that_name_a_new_device_at_once_get_one_object() -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: Device("cpu", 987_654), range(100)))

    assert len({id(device) for device in found}) == 1


def test_slots_are_numbered_from_zero() -> None:
    assert cpu_slots(3) == (Device("cpu", 0), Device("cpu", 1), Device("cpu", 2))
    assert cpu_slots(0) == ()
