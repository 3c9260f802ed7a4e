"""Machines whose topology is recorded, to ask what would be chosen there."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path

from unisono.devices import Machine, Topology, as_recorded

FOLDER = Path(__file__).parent / "topologies"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def recorded(name: str) -> Topology:
    return Topology.from_json(json.loads((FOLDER / f"{name}.json").read_text()))


def on(name: str) -> AbstractContextManager[Machine]:
    """Within the block this host is said to be the recorded one."""
    return as_recorded(recorded(name))
