"""What recorded traces tell: all workers on one clock, where the time went, a timeline."""

from unisono_tools.traces.clocks import align
from unisono_tools.traces.summary import Shares, Straggler, Summary, summarise
from unisono_tools.traces.timeline import timeline

__all__ = ["Shares", "Straggler", "Summary", "align", "summarise", "timeline"]
