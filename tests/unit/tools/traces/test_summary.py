"""Traces of programs that call collectives without a strategy are summed up as well."""

from __future__ import annotations

from unisono.tracing import Event, Shares, Thread, WorkerTrace, summarise

MS = 1_000_000


def worker(rank: int, *threads: list[tuple[int, int, int, int]]) -> WorkerTrace:
    """Of each collective: start and end in milliseconds, group and number."""
    events = [
        [
            Event(start * MS, end * MS, "collective", "all_reduce", {"group": group, "number": n})
            for start, end, group, n in thread
        ]
        for thread in threads
    ]
    return WorkerTrace(
        rank, 2, "host", "clock", 0, [Thread(f"thread {n}", one) for n, one in enumerate(events)]
    )


def test_without_steps_the_time_around_collectives_counts() -> None:
    first = worker(0, [(0, 11, 1, 1), (20, 31, 1, 2)])
    second = worker(1, [(10, 11, 1, 1), (30, 31, 1, 2)])

    summary = summarise([first, second])

    assert summary.replicas == {
        0: Shares(compute=9 * MS, communication=2 * MS, waiting=20 * MS),
        1: Shares(compute=19 * MS, communication=2 * MS),
    }
    assert summary.straggler is not None
    assert (summary.straggler.worker, summary.straggler.replica) == (1, None)
    assert summary.straggler.waited == 20 * MS
    text = str(summary)
    assert "between the first and the last collective" in text
    assert "Straggler: worker 1, for which the others waited 20.0 ms" in text


def test_collectives_of_two_groups_at_the_same_time_count_once() -> None:
    first = worker(0, [(0, 10, 1, 1)], [(5, 20, 2, 1)])
    second = worker(1, [(0, 10, 1, 1)], [(15, 20, 2, 1)])

    summary = summarise([first, second])

    assert summary.replicas[0] == Shares(communication=10 * MS, waiting=10 * MS)
    assert summary.replicas[1] == Shares(compute=5 * MS, communication=15 * MS)
