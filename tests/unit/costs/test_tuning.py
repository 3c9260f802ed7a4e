"""The file: what is written is read, and what is broken or foreign is said."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import unisono as uo
from unisono.costs import Link, Run, Tuning, current_tuning, read_tuning, tuning_path
from unisono.costs.tuning import this_machine_in_words
from unisono.errors import TuningError

HERE = Tuning(
    memory=Link(1e-6, 1e10, 0.0),
    devices=Link(2e-6, 5e9),
    inside=Link(3e-6, 4e9),
    loopback=None,
    between=None,
    sum_rate=1e10,
    machine=this_machine_in_words(),
    date="2026-11-15",
    version="0.1.0",
    runs=(Run(1, 2, ((1024, 2e-5), (4096, 3e-5))),),
)


@pytest.fixture
def in_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default path, in its own cache."""
    monkeypatch.delenv("UNISONO_TUNING")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "unisono" / "tuning.json"
    assert tuning_path() == path
    path.parent.mkdir()
    return path


def test_what_is_written_is_read(in_cache: Path) -> None:
    in_cache.write_text(HERE.to_text())

    assert current_tuning() == HERE


def test_without_a_file_nothing_is_tuned(in_cache: Path) -> None:
    assert current_tuning() is None


def test_off_is_off(in_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_cache.write_text(HERE.to_text())
    monkeypatch.setenv("UNISONO_TUNING", "off")

    assert current_tuning() is None


def changed(**values: object) -> str:
    return json.dumps({**json.loads(HERE.to_text()), **values})


BROKEN = {
    "empty": "",
    "not json": "{",
    "a list": "[]",
    "later format": changed(format=3),
    "no memory": changed(memory=None),
    "negative": changed(inside={"latency": -1, "bandwidth": 1, "overhead": 0}),
    "no rate": changed(sum_rate=0.0),
    "no machine": changed(machine=["cpu"]),
    "deep": "[" * 100_000,
    "no run": changed(runs=[[0, 2, [[1024, 1e-5]]]]),
    "no times": changed(runs=[[1, 2, []]]),
    "wrong order": changed(runs=[[1, 2, [[4096, 1e-5], [1024, 1e-5]]]]),
    "no seconds": changed(runs=[[1, 2, [[1024, 0.0]]]]),
    "more": changed(color="red"),
    "foreign": changed(machine={"cpu": "another", "cores": 3, "gpus": []}),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_file_that_cannot_be_used_is_left_alone_with_one_line(
    text: str, in_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_cache.write_text(text)

    with caplog.at_level(logging.WARNING, "unisono"):
        assert current_tuning() is None

    (line,) = caplog.messages
    assert str(in_cache) in line
    assert "unisono tune" in line


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_file_that_was_named_must_be_right(
    text: str, in_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_cache.write_text(text)
    monkeypatch.setenv("UNISONO_TUNING", str(in_cache))

    with pytest.raises(TuningError, match=r"tuning\.json .*unisono tune"):
        current_tuning()


def test_a_named_file_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_TUNING", "/nowhere/tuning.json")

    with pytest.raises(TuningError, match=r"/nowhere/tuning\.json cannot be read"):
        current_tuning()


def test_a_foreign_file_can_be_read_to_plan_with(in_cache: Path) -> None:
    foreign = replace(HERE, machine={"cpu": "another", "cores": 3, "gpus": []})
    in_cache.write_text(foreign.to_text())

    assert read_tuning(in_cache) == foreign


@pytest.mark.parametrize("home", [None, "", "/nowhere", "/dev/null", "/" + "x" * 5000])
def test_a_home_folder_that_cannot_be_read_does_not_stop_a_strategy(
    home: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("UNISONO_TUNING", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    if home is None:
        # A user that the system does not know, as in many containers.
        monkeypatch.setattr(os, "getuid", lambda: 2**31 - 9)
    else:
        monkeypatch.setenv("HOME", home)

    assert current_tuning() is None
    assert uo.MirroredStrategy(["cpu:0", "cpu:1"]).num_replicas_in_sync == 2


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_does_not_stop_a_strategy(
    make: Callable[[Path], None], in_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(in_cache)

    with caplog.at_level(logging.WARNING, "unisono"):
        assert current_tuning() is None

    (line,) = caplog.messages
    assert "not a regular file" in line


def test_a_folder_that_may_not_be_read_does_not_stop_a_strategy(
    in_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stands for permissions, which the system administrator, who may run this, has always.
    def refuse(path: object, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", refuse)

    assert current_tuning() is None
