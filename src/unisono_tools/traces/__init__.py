"""Analyses recorded traces: all workers on one clock, a summary, a timeline."""

from unisono_tools.traces.clocks import align
from unisono_tools.traces.files import Event, Thread, WorkerTrace, read_folder
from unisono_tools.traces.summary import Shares, Straggler, Summary, summarise
from unisono_tools.traces.timeline import timeline

__all__ = [
    "Event",
    "Shares",
    "Straggler",
    "Summary",
    "Thread",
    "WorkerTrace",
    "align",
    "read_folder",
    "summarise",
    "timeline",
]
