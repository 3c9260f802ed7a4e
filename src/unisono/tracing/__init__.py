"""What every thread of every worker does and when, recorded into files.

with tracing.record("folder") as trace: ...     each worker writes folder/worker-RANK.jsonl
span                                            one line at each place that is recorded
read_folder, align, summarise, timeline         what they tell; from `unisono_tools`, when used
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unisono.tracing.spans import Span, join_workers, span

if TYPE_CHECKING:
    from unisono.tracing.recording import Trace, record, record_if_asked
    from unisono_tools.traces import (
        Event,
        Shares,
        Straggler,
        Summary,
        Thread,
        WorkerTrace,
        align,
        read_folder,
        summarise,
        timeline,
    )

__all__ = [
    "Event",
    "Shares",
    "Span",
    "Straggler",
    "Summary",
    "Thread",
    "Trace",
    "WorkerTrace",
    "align",
    "join_workers",
    "read_folder",
    "record",
    "record_if_asked",
    "span",
    "summarise",
    "timeline",
]


def _load(name: str) -> Any:
    """Returns a name that few programs need, which Python asks for when it is not here yet."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from unisono.tracing import recording

    return getattr(recording if hasattr(recording, name) else recording.analysis(), name)


if not TYPE_CHECKING:
    # A type checker that sees it takes every name to be there.
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
