"""What a host has and what Unisono would choose there, as data and as text."""

from unisono_tools.hosts.drawing import draw
from unisono_tools.hosts.report import HostReport, recorded_host, this_host

__all__ = ["HostReport", "draw", "recorded_host", "this_host"]
