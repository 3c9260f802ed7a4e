"""What every thread of every worker did and when: recorded, merged, drawn and summed up.

with tracing.record("folder") as trace: ...     each worker writes folder/worker-RANK.jsonl
span                                            one line at each place that is recorded
read_folder, align                              the files of all workers, on one clock
summarise, timeline                             where the step went; what Perfetto opens
"""

from unisono.tracing.clocks import align
from unisono.tracing.files import Event, Thread, WorkerTrace, read_folder
from unisono.tracing.recording import Trace, record, record_if_asked
from unisono.tracing.spans import Span, join_workers, span
from unisono.tracing.summary import Shares, Straggler, Summary, summarise
from unisono.tracing.timeline import timeline

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
