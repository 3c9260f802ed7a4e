"""Scripts that launchers start."""

from __future__ import annotations

from pathlib import Path

MEETS = """
from unisono.cluster import Membership, WorkerCard, detect, meet, open_store

membership = Membership.of(detect())
met = meet(open_store(membership, 30), WorkerCard.of(membership, num_devices=1), 30)
print(membership.task_type, membership.rank, "of", len(met), membership.restart_count, flush=True)
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path
