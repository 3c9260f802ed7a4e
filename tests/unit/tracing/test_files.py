"""What is written is read again, and what cannot be read is refused with a reason."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from unisono.errors import ContextError, TraceError, UnsupportedError
from unisono.tracing import read_folder, record, span, summarise
from unisono.tracing.recorder import Recorder
from unisono.tracing.spans import Place


def test_spans_come_back_as_they_were(tmp_path: Path) -> None:
    ticks = iter(range(100, 200, 10))
    with (
        record(tmp_path, clock=lambda: next(ticks)),
        span("step", "outer", step=1),
        span("wait", "inner") as waiting,
    ):
        waiting.note(last=3)

    (worker,) = read_folder(tmp_path)
    (thread,) = worker.threads
    assert thread.name == "MainThread"
    assert thread.events == [
        (100, 130, "step", "outer", {"step": 1}),
        (110, 120, "wait", "inner", {"last": 3}),
    ]
    assert worker.num_dropped == 0


def test_threads_of_one_name_that_follow_each_other_share_a_lane() -> None:
    recorder = Recorder(time.perf_counter_ns, 10)
    for _ in range(3):
        thread = threading.Thread(target=recorder.add, args=(0, "input", "fetch", {}), name="input")
        thread.start()
        thread.join()
    recorder.add(0, "step", "run", {})

    assert [(lane.thread.name, lane.count) for lane in recorder.lanes] == [
        ("input", 3),
        ("MainThread", 1),
    ]


def test_threads_of_one_name_at_the_same_time_have_lanes_of_their_own() -> None:
    recorder = Recorder(time.perf_counter_ns, 10)
    barrier = threading.Barrier(2, timeout=60)

    def add() -> None:
        recorder.add(0, "input", "fetch", {})
        barrier.wait()

    threads = [threading.Thread(target=add, name="input") for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)

    assert [lane.count for lane in recorder.lanes] == [1, 1]


def test_a_trace_within_a_trace_is_refused(tmp_path: Path) -> None:
    with record(tmp_path / "outer"):
        with (
            pytest.raises(ContextError, match="already being recorded"),
            record(tmp_path / "inner"),
        ):
            pass
        with span("step", "still recorded"):
            pass

    assert [event.name for event in read_folder(tmp_path / "outer")[0].events()] == [
        "still recorded"
    ]
    assert list((tmp_path / "inner").iterdir()) == []


def test_room_for_no_event_is_refused(tmp_path: Path) -> None:
    refused = pytest.raises(UnsupportedError, match="`max_events` must be 1 or more, got 0")
    with refused, record(tmp_path, max_events=0):
        pass


def test_a_folder_without_a_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")

    with pytest.raises(TraceError, match=r"no trace in .*UNISONO_TRACE="):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not the trace of a worker"),
        ("{}\n", "KeyError"),
        ('{"format": "unisono trace 9", "threads": []}\n', "this version reads 'unisono trace 1'"),
        (
            '{"format": "unisono trace 1", "threads": []}\n[0, 1, 2]\n',
            "is not the trace of a worker",
        ),
    ],
)
def test_a_file_that_is_no_trace_is_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "worker-0.jsonl").write_text(content)

    with pytest.raises(TraceError, match=message):
        read_folder(tmp_path)


def test_files_of_two_runs_are_refused(tmp_path: Path) -> None:
    for place in (Place(0, 2), Place(1, 3)):
        Recorder(time.perf_counter_ns, 1).write(tmp_path, place)

    with pytest.raises(TraceError, match="several runs, with 2 and 3 workers"):
        read_folder(tmp_path)


def test_a_trace_without_a_step_has_no_summary(tmp_path: Path) -> None:
    Recorder(time.perf_counter_ns, 1).write(tmp_path, Place(0, 1))

    with pytest.raises(TraceError, match="holds no step"):
        summarise(read_folder(tmp_path))
