import inspect
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_machines import NAMES, recorded

from unisono.devices import Gpu, Link, Topology
from unisono.devices.topology import read_nvml, read_topology
from unit.devices.fake_nvml import FakeNvml, torch_sees, write_numa_nodes


@pytest.fixture(autouse=True)
def read_anew() -> Iterator[None]:
    """The topology is read once: these tests ask each for another one."""
    read_topology.cache_clear()
    yield
    read_topology.cache_clear()


@pytest.mark.parametrize("name", NAMES)
def test_nvml_on_a_recorded_machine_gives_the_recording(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    topology = recorded(name)
    nvml = FakeNvml(topology)
    torch_sees(topology, monkeypatch)

    found = read_nvml(nvml, write_numa_nodes(topology, tmp_path))

    assert found == replace(topology, source="NVML")
    assert nvml.num_users == 0


@pytest.mark.parametrize(
    "rows",
    [
        # Every kind of path through PCIe, and a pair on a bridge of four NVLinks.
        [
            "X PIX PXB PHB* NODE",
            "PIX X SYS* SYS* SYS*",
            "PXB SYS* X NV4 NODE*",
            "PHB* SYS* NV4 X NODE",
            "NODE SYS* NODE* NODE X",
        ],
        # The last GPU has lost two of its links to the switch.
        ["X NVS18 NVS16", "NVS18 X NVS16", "NVS16 NVS16 X"],
    ],
)
def test_links_of_every_kind_are_read(
    rows: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    links = [tuple(Link.parse(cell) for cell in row.split()) for row in rows]
    gpus = tuple(Gpu("card", 1, row, f"0000:0{i}:00.0") for i, row in enumerate(links))
    topology = Topology(gpus, "NVML")
    torch_sees(topology, monkeypatch)

    assert read_nvml(FakeNvml(topology), write_numa_nodes(topology, tmp_path)) == topology


def test_a_numa_node_that_linux_does_not_know_is_left_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    topology = recorded("pcie_4")
    torch_sees(topology, monkeypatch)

    found = read_nvml(FakeNvml(topology), tmp_path)

    assert [gpu.numa_node for gpu in found.gpus] == [None] * 4


def test_without_a_gpu_there_is_an_empty_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert read_topology() == recorded("no_gpu")


def test_nvml_is_asked_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = recorded("dgx_1")
    torch_sees(topology, monkeypatch)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(topology))

    assert read_topology().source == "NVML"
    assert str(read_topology().link(0, 3)) == "NV2"


class BrokenNvml(FakeNvml):
    def nvmlInit(self) -> None:
        raise self.NVMLError("Driver/library version mismatch")


class OldNvml(FakeNvml):
    @property
    def nvmlDeviceGetName(self) -> Any:
        raise AttributeError("module 'pynvml' has no attribute 'nvmlDeviceGetName'")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (None, "pip install 'unisono[gpu]'"),
        (BrokenNvml, "Driver/library version mismatch"),
        (OldNvml, "has no attribute"),
    ],
)
def test_without_nvml_torch_says_who_is_a_peer_and_one_log_line_why(
    make: type[FakeNvml] | None,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    topology = recorded("dgx_1")
    torch_sees(topology, monkeypatch)
    # None in this place makes the import fail.
    monkeypatch.setitem(sys.modules, "pynvml", make and make(topology))

    with caplog.at_level(logging.INFO):
        found, again = read_topology(), read_topology()

    assert found is again
    assert why in found.source
    assert [why in line for line in caplog.messages] == [True]
    assert [gpu.name for gpu in found.gpus] == ["Tesla V100-SXM2-16GB"] * 8
    assert " ".join(map(str, found.gpus[0].links)) == "X ? ? ? ? ?* ?* ?*"


def test_the_fake_has_names_values_and_arguments_of_the_real_package() -> None:
    real = pytest.importorskip("pynvml")

    for name, ours in vars(FakeNvml).items():
        if name.startswith("NVML_"):
            assert getattr(real, name) == ours
        elif name.startswith("nvml"):
            arguments = inspect.signature(ours).parameters.keys() - {"self"}
            required = [
                parameter
                for parameter in inspect.signature(getattr(real, name)).parameters.values()
                if parameter.default is parameter.empty
            ]
            assert len(required) == len(arguments)


@pytest.mark.gpu
def test_a_real_gpu_is_found_with_its_name_and_its_memory() -> None:
    topology = read_topology()

    assert len(topology.gpus) == torch.cuda.device_count()
    assert topology.gpus[0].name == torch.cuda.get_device_name(0)
    assert topology.gpus[0].num_bytes > 0
