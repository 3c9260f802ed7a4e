import pytest
import torch
from recorded_machines import on

import unisono as uo
from unisono.costs import Link, Tuning
from unisono.devices import default_devices, pretend
from unisono.errors import DeviceError
from unisono.reductions import choose_cross_device_ops, predicted_cost, select_cross_device_ops
from unisono.testing import separate_memories, virtual_gpus

GPUS = tuple(torch.device("cuda", i) for i in range(4))


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_cpu_slots_reduce_on_one_device(num_devices: int) -> None:
    chosen = select_cross_device_ops([f"/cpu:{i}" for i in range(num_devices)])

    assert type(chosen) is uo.ReductionToOneDevice


@pytest.mark.parametrize("num_devices", [2, 3, 4])
def test_different_gpus_use_nccl(num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)

    with pretend(gpus=GPUS):
        chosen = select_cross_device_ops([f"/gpu:{i}" for i in range(num_devices)])

    assert type(chosen) is uo.NcclAllReduce


def test_different_gpus_without_nccl_use_the_hierarchical_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)

    with on("pcie_4"):
        chosen = select_cross_device_ops(default_devices())

    assert type(chosen) is uo.HierarchicalCopyAllReduce


def test_slots_on_several_gpus_use_the_hierarchical_copy() -> None:
    with on("pcie_4"), virtual_gpus(6):
        ops, reason = choose_cross_device_ops(default_devices(), has_nccl=True)

    assert type(ops) is uo.HierarchicalCopyAllReduce
    assert reason.startswith("replicas share GPUs, which NCCL does not allow")


@pytest.mark.parametrize(
    ("machine", "with_nccl", "without"),
    [
        (
            "dgx_1",
            "8 different GPUs",
            "between cuda:0, cuda:1, cuda:2, cuda:3 | cuda:4, cuda:5, cuda:6, cuda:7",
        ),
        (
            "dgx_h100",
            "8 different GPUs",
            "between cuda:0, cuda:1, cuda:2, cuda:3 | cuda:4, cuda:5, cuda:6, cuda:7",
        ),
        ("pcie_4", "4 different GPUs", "no NCCL; it sends little between cuda:0, cuda:1 | cuda:2"),
        ("one_gpu", "one replica", "one replica"),
        ("no_gpu", "one replica", "one replica"),
    ],
)
def test_the_reason_tells_of_the_machine(machine: str, with_nccl: str, without: str) -> None:
    with on(machine):
        devices = default_devices()

        assert with_nccl in choose_cross_device_ops(devices, has_nccl=True).reason
        assert without in choose_cross_device_ops(devices, has_nccl=False).reason


def test_a_log_line_says_what_was_chosen_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        select_cross_device_ops(["cpu:0", "cpu:1"])

    assert caplog.messages == [
        "ReductionToOneDevice reduces: 2 replicas share one memory, where a sum needs no copy."
    ]


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


def tuned(latency: float, bandwidth: float) -> Tuning:
    link = Link(latency, bandwidth, 0.0)
    memory = Link(1e-6, 1e11, 0.0)
    return Tuning(memory, link, None, None, None, 1e11, {}, "2026-11-15", "0.1.0")


@pytest.mark.parametrize("num_devices", [4, 6, 8])
def test_measured_links_decide_between_one_device_and_two_levels(num_devices: int) -> None:
    devices = [f"/cpu:{i}" for i in range(num_devices)]

    with separate_memories():
        few_bytes_a_second = select_cross_device_ops(devices, tuned(1e-6, 1e9))
        long_steps = select_cross_device_ops(devices, tuned(1e-1, 1e9))

    # Two levels send less through one link, in twice the number of steps.
    assert type(few_bytes_a_second) is uo.HierarchicalCopyAllReduce
    assert type(long_steps) is uo.ReductionToOneDevice


@pytest.mark.parametrize("num_devices", [1, 2])
def test_one_or_two_devices_leave_no_choice(num_devices: int) -> None:
    with separate_memories():
        chosen = select_cross_device_ops(["/cpu:0", "/cpu:1"][:num_devices], tuned(1e-6, 1e9))

    assert type(chosen) is uo.ReductionToOneDevice


def test_in_one_memory_nothing_travels_and_measured_links_do_not_matter() -> None:
    devices = [f"/cpu:{i}" for i in range(4)]

    assert type(select_cross_device_ops(devices, tuned(1e-6, 1e9))) is uo.ReductionToOneDevice


def test_only_reductions_with_a_schedule_have_a_predicted_cost() -> None:
    devices = tuple(uo.Device("cpu", i) for i in range(4))
    tuning = tuned(1e-5, 1e9)

    cost = predicted_cost(uo.ReductionToOneDevice("cpu:7"), devices, tuning)

    assert cost is not None
    assert cost.latency == pytest.approx(1e-6)
    # Each replica's value is read, and the result is written for each and for the root.
    assert cost.per_byte == pytest.approx(10 / 1e11)
    assert predicted_cost(uo.ReductionToOneDevice(), devices, None) is None
    assert predicted_cost(uo.NcclAllReduce(), devices, tuning) is None
