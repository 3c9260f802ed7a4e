"""The list of the processes of data loaders, without the interpreter lock."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling as handling

from unisono.input import prefetch
from unisono.input.prefetch import Prefetcher

signal_handling: Any = handling


def test_the_list_of_processes_is_not_read_while_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_removing, seen = threading.Event(), list[str]()

    def remove(_: int) -> None:
        is_removing.set()
        is_read.wait(0.2)
        seen.append("removed")

    is_read = threading.Event()

    def read() -> None:
        seen.append("read")
        is_read.set()

    monkeypatch.setattr(signal_handling, "_remove_worker_pids", remove)
    monkeypatch.setattr(signal_handling, "_error_if_any_worker_fails", read)
    monkeypatch.setattr(signal_handling, "_set_worker_pids", lambda *_: None)
    guard: Any = prefetch.guard_list_of_processes
    guard.__wrapped__()
    thread = threading.Thread(target=signal_handling._remove_worker_pids, args=(1,))
    thread.start()
    assert is_removing.wait(30)
    signal_handling._error_if_any_worker_fails()
    thread.join()

    assert seen == ["removed", "read"]


@pytest.mark.parametrize("has_lock", [False, True])
def test_who_draws_ahead_without_the_lock_guards_the_list(
    monkeypatch: pytest.MonkeyPatch, has_lock: bool
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(prefetch, "has_lock", lambda: has_lock)
    monkeypatch.setattr(prefetch, "guard_list_of_processes", lambda: calls.append(1))
    draw = iter(DataLoader([1, 2, 3])).__next__  # type: ignore[arg-type]

    assert len(list(Prefetcher(draw, 2))) == 3
    assert calls == ([] if has_lock else [1])
