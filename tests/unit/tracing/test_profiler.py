"""Spans are ranges of `torch.profiler` while one is active, with or without a trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import unisono as uo
from unit.tracing.test_training import events_of, training


def ranges(profiled: profile) -> dict[str, int]:
    averages = profiled.key_averages()
    return {one.key: one.count for one in averages if one.key.startswith("unisono::")}


def test_steps_are_ranges_of_the_profiler() -> None:
    with training(num_replicas=2) as step:
        step()
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            step()
            step()
        step()

    found = ranges(profiled)
    assert found["unisono::run"] == 2
    assert found["unisono::backward() number 0"] >= 2
    assert found["unisono::SGD.step()"] >= 2


def test_a_trace_and_a_profiler_may_be_active_at_once(tmp_path: Path) -> None:
    with (
        training(num_replicas=2) as step,
        uo.tracing.record(tmp_path) as trace,
        profile(activities=[ProfilerActivity.CPU]) as profiled,
    ):
        step()

    assert ranges(profiled)["unisono::run"] == 1
    (last,) = {
        e.arguments["last"]
        for e in events_of(trace)
        if e.name == "SGD.step()" and "last" in e.arguments
    }
    assert last in (0, 1)


def test_a_profiler_of_all_threads_sees_every_replica() -> None:
    try:
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        pytest.skip("this torch profiles one thread only")
    with training(num_replicas=3) as step:
        step()
        with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiled:
            step()

    assert ranges(profiled)["unisono::replica"] == 3
