"""What `unisono info` tells of this host, and of recorded ones."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from recorded_machines import FOLDER, NAMES
from torch.distributed import is_gloo_available

from unisono.costs import Link, Tuning
from unisono.costs.tuning import this_machine_in_words
from unisono.devices import default_devices
from unisono.kernels import native_core
from unisono_tools.cli import main


def told(*arguments: object) -> str:
    result = CliRunner().invoke(main, ["info", *map(str, arguments)])

    assert result.exit_code == 0, result.output
    return result.output


def told_of(machine: str) -> str:
    """What `info` says of a recorded machine."""
    return told("--topology", FOLDER / f"{machine}.json")


def test_a_recording_made_in_a_process_is_drawn_as_its_host_is(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unisono", "info", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
    (tmp_path / "host.json").write_text(ran.stdout)

    report = json.loads(ran.stdout)

    assert (ran.returncode, ran.stderr) == (0, "")
    assert report["versions"]["torch"] == torch.__version__
    assert report["versions"]["python"] == platform.python_version()
    assert report["engines"]["native core"]["detail"] == native_core().status
    assert report["devices"] == [str(device) for device in default_devices()]
    assert told("--topology", tmp_path / "host.json") == told()


def test_the_text_says_what_is_there_and_what_is_not() -> None:
    lines = [" ".join(line.split()) for line in told().splitlines()]

    assert f"torch {torch.__version__}" in lines
    assert "1 worker, cpu:0 and cpu:1 ReductionToOneDevice" in lines
    assert f"Gloo {'yes between' if is_gloo_available() else 'no this torch'}" in "\n".join(lines)


def test_the_native_core_decides_what_workers_of_a_host_share(path: str) -> None:
    report = json.loads(told("--json"))

    assert report["engines"]["native core"]["is_found"] is (path == "native")
    carrier = report["communicators"]["2 workers on this host"]["what"]
    assert carrier == ("shared memory" if path == "native" else "Gloo")


def test_the_matrix_of_a_dgx_1_is_drawn() -> None:
    matrix = """
          0    1    2    3    4    5    6    7
  cuda:0  X    NV1  NV1  NV2  NV2  SYS* SYS* SYS*
  cuda:1  NV1  X    NV2  NV1  SYS* NV2  SYS* SYS*
  cuda:2  NV1  NV2  X    NV2  SYS* SYS* NV1  SYS*
  cuda:3  NV2  NV1  NV2  X    SYS* SYS* SYS* NV1
  cuda:4  NV2  SYS* SYS* SYS* X    NV1  NV1  NV2
  cuda:5  SYS* NV2  SYS* SYS* NV1  X    NV2  NV1
  cuda:6  SYS* SYS* NV1  SYS* NV1  NV2  X    NV2
  cuda:7  SYS* SYS* SYS* NV1  NV2  NV1  NV2  X

  NV#     that many NVLinks
  SYS     the connection between NUMA nodes
  *       no peer access: CUDA copies through the memory of the host
"""

    assert matrix in told_of("dgx_1")


@pytest.mark.parametrize(
    ("machine", "lines"),
    [
        (
            "dgx_1",
            [
                "  ├─ cuda:0  cuda:1  cuda:2  cuda:3",
                "  └─ cuda:4  cuda:5  cuda:6  cuda:7",
                "  1 worker, cuda:0 to cuda:7     NcclAllReduce",
            ],
        ),
        (
            "dgx_h100",
            [
                "  NVS#    that many NVLinks, through NVSwitch",
                "  └─ cuda:4  cuda:5  cuda:6  cuda:7",
                "      8 different GPUs, whose links NCCL knows how to use",
            ],
        ),
        (
            "pcie_4",
            [
                "  cuda:1  PIX  X    SYS* SYS*",
                "  ├─ cuda:0  cuda:1",
                "  └─ cuda:2  cuda:3",
            ],
        ),
        (
            "one_gpu",
            [
                "  cuda:0   NVIDIA H200                       140 GiB  0000:00:06.0",
                "  1 worker, cuda:0               ReductionToOneDevice",
            ],
        ),
        ("no_gpu", ["  1 worker, cpu:0                ReductionToOneDevice"]),
    ],
)
def test_a_recorded_machine_is_drawn(machine: str, lines: list[str]) -> None:
    assert set(lines) <= set(told_of(machine).splitlines())


@pytest.mark.parametrize("machine", NAMES)
def test_eighty_columns_are_enough(machine: str) -> None:
    assert max(map(len, told_of(machine).splitlines())) <= 80


def test_a_recording_says_what_its_engines_allow(tmp_path: Path) -> None:
    missing = {"is_found": False, "detail": "not there"}
    topology = json.loads((FOLDER / "pcie_4.json").read_text())
    recording = {"topology": topology, "engines": {"NCCL": missing, "native core": missing}}
    (tmp_path / "host.json").write_text(json.dumps(recording))

    report = json.loads(told("--json", "--topology", tmp_path / "host.json"))

    assert report["topology"] == topology
    assert report["groups"] == [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]
    assert report["reductions"]["cuda:0 to cuda:3"]["what"] == "HierarchicalCopyAllReduce"
    assert report["communicators"]["2 workers on this host"] == {
        "what": "Gloo",
        "reason": "not every rank has a native core",
    }


@pytest.mark.parametrize(
    ("recording", "what", "reason"),
    [
        ("dgx_1", "one process per GPU", "`unisono.function`"),
        ("one_gpu", "one process", "one GPU has one replica"),
        ({"num_cores": 16}, "one process", "`unisono.function`"),
        ({"num_cores": 2}, "one process", "two CPU replicas"),
        ({"num_cores": 16, "is_free": True}, "one process", "free-threaded"),
    ],
)
def test_it_says_whether_one_process_trains_or_many(
    recording: Any, what: str, reason: str, tmp_path: Path
) -> None:
    path = FOLDER / f"{recording}.json"
    if isinstance(recording, dict):
        path = tmp_path / "host.json"
        threads = {"is_found": recording.pop("is_free", False), "detail": ""}
        recording["topology"] = json.loads((FOLDER / "no_gpu.json").read_text())
        path.write_text(json.dumps({**recording, "engines": {"free threads": threads}}))

    chosen = json.loads(told("--json", "--topology", path))["processes"]

    assert chosen["what"] == what
    assert reason in chosen["reason"]
    assert re.search(rf"all devices of this host +{what}\n", told("--topology", path))


def tuning_here(**links: Link | None) -> Tuning:
    fast = Link(1e-6, 1e11)
    known: dict[str, Any] = {"inside": fast, "loopback": fast, "between": None, **links}
    return Tuning(
        memory=fast,
        devices=fast,
        sum_rate=1e11,
        machine=this_machine_in_words(),
        date="2026-11-15",
        version="0.1.0",
        **known,
    )


def test_a_tuning_is_shown_and_choices_go_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tuning.json"
    monkeypatch.setenv("UNISONO_TUNING", str(path))
    tuning = tuning_here(between=Link(2e-6, 5e10))
    path.write_text(tuning.to_text())

    text, report = told(), json.loads(told("--json"))
    (tmp_path / "host.json").write_text(json.dumps(report))

    assert str(path) in re.sub(r"\n *", "", text).replace(" ", "")
    assert re.search(r"hosts, Gloo +2 us +50 GB/s", text)
    assert report["tuning"]["constants"]["date"] == "2026-11-15"
    monkeypatch.setenv("UNISONO_TUNING", "off")
    assert told("--topology", tmp_path / "host.json") == text


@pytest.mark.parametrize("path", ["native"], indirect=True)
@pytest.mark.parametrize(
    ("between", "what", "reason"),
    [
        (None, "shared memory inside a host, Gloo between", "links between hosts are not tuned"),
        (Link(1e-3, 1e7), "shared memory inside a host, Gloo between", "4 MiB are predicted to"),
        (Link(1e-9, 1e12), "Gloo", "the links as tuned promise"),
    ],
)
def test_what_was_measured_between_hosts_decides_what_carries(
    path: str,
    between: Link | None,
    what: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "tuning.json"
    file.write_text(tuning_here(inside=Link(1e-4, 1e8), between=between).to_text())
    monkeypatch.setenv("UNISONO_TUNING", str(file))

    chosen = json.loads(told("--json"))["communicators"]["2 workers on each of 2 hosts"]

    assert chosen["what"] == what
    assert reason in chosen["reason"]


def test_it_says_that_there_is_no_tuning_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "UNISONO_TUNING=off is set" in told()
    monkeypatch.setenv("UNISONO_TUNING", str(tmp_path / "none.json"))
    assert "no strategy can be made: The tuning" in told()
    monkeypatch.delenv("UNISONO_TUNING")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "not tuned: run `unisono tune`" in told()
    (tmp_path / "unisono").mkdir()
    (tmp_path / "unisono" / "tuning.json").write_text("{}")
    assert "is of another machine or version: run `unisono tune`" in told()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "Expecting value"),
        ("[]", "a JSON object, got a list"),
        ("{}", "not a recorded topology (KeyError: 'gpus'"),
        ('{"topology": {"gpus": [], "source": ""}, "engines": {"NCCL": 1}}', "got {'NCCL': 1}"),
        ('{"topology": {"gpus": [], "source": ""}, "tuning": 7}', "`detail`, got 7"),
        (
            '{"topology": {"gpus": [], "source": ""}, "tuning": {"constants": {}}}',
            "The tuning is not a tuning file",
        ),
    ],
)
def test_what_is_no_recording_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "host.json").write_text(content)

    result = CliRunner().invoke(main, ["info", "--topology", str(tmp_path / "host.json")])

    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
