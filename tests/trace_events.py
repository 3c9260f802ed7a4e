"""What a file of Chrome's trace events must be like, so that Perfetto opens it."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

PHASES = {"X", "M", "s", "f"}
FIELDS = {"ph", "name", "pid", "tid", "ts"}


def check_trace_events(drawn: dict[str, Any]) -> None:
    """Checks what Perfetto and chrome://tracing ask of a file, after a way through JSON."""
    events = json.loads(json.dumps(drawn))["traceEvents"]
    for event in events:
        assert event["ph"] in PHASES
        assert event.keys() >= FIELDS
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= 0
    for spans in by_thread(events).values():
        starts = [event["ts"] for event in spans]
        assert starts == sorted(starts)
        check_nesting(spans)
    arrows: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["id"]][event["ph"]] = event["ts"]
    assert all(ends.keys() == {"s", "f"} and ends["s"] <= ends["f"] for ends in arrows.values())


def by_thread(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    return threads


def check_nesting(spans: list[dict[str, Any]]) -> None:
    """A span ends before the one that it began in."""
    ends: list[float] = []
    for event in spans:
        assert event["dur"] >= 0
        # Microseconds in binary are not exact: a thousandth of a nanosecond does not count.
        end = event["ts"] + event["dur"]
        while ends and ends[-1] <= event["ts"] + 1e-6:
            ends.pop()
        assert not ends or end <= ends[-1] + 1e-6
        ends.append(end)
