"""The timeline is in Chrome's trace event format, with spans that lie in each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from trace_events import check_trace_events

import unisono as uo
from unisono.tracing import Event, Thread, WorkerTrace, timeline
from unit.tracing.test_training import training


def names(events: list[dict[str, Any]], kind: str) -> list[str]:
    return [event["args"]["name"] for event in events if event["name"] == kind]


def test_the_timeline_of_a_real_run_is_well_formed(tmp_path: Path) -> None:
    strategy = uo.OneDeviceStrategy("cpu:0")
    data = strategy.experimental_distribute_dataset([torch.ones(2)] * 3)
    with training(num_replicas=2) as step, uo.tracing.record(tmp_path) as trace:
        for _ in data:
            step()

    drawn = trace.timeline()

    check_trace_events(drawn)
    events = drawn["traceEvents"]
    assert names(events, "thread_name")[:2] == ["replica 0 (program)", "replica 1"]
    assert [event["name"] for event in events if event.get("cat") == "step"] == [
        "run 1",
        "run 2",
        "run 3",
    ]


def test_an_arrow_leads_from_a_filled_pack_to_its_exchange() -> None:
    replica = Thread(
        "MainThread",
        [
            Event(0, 9_000, "replica", "replica", {"replica": 0}),
            Event(1_000, 2_000, "copy", "fill pack", {"pack": 0}),
            Event(3_000, 4_000, "copy", "fill pack", {"pack": 1}),
        ],
    )
    sender = Thread("exchange", [Event(2_500, 5_000, "reduce", "exchange pack", {"pack": 0})])
    worker = WorkerTrace(1, 2, "host", "clock", 0, [replica, sender])

    drawn = timeline([worker])

    check_trace_events(drawn)
    arrows = [event for event in drawn["traceEvents"] if event["ph"] in "sf"]
    assert [(one["ph"], one["tid"], one["ts"]) for one in arrows] == [("s", 0, 2.0), ("f", 1, 2.5)]
    assert names(drawn["traceEvents"], "process_name") == ["worker 1 (host)"]
    assert names(drawn["traceEvents"], "thread_name") == ["replica 1", "exchange"]
