"""What a worker says of itself when it meets the others."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from unisono.cluster.membership import Membership
from unisono.communicators.headers import ranks_in_words

# What must be equal on all workers, and how a message names it.
_FACTS = {
    "size": "number of workers",
    "num_replicas": "`num_replicas`",
    "script": "script",
    "library": "version of unisono",
    "python": "version of Python",
    "torch": "version of torch",
}


@dataclass(frozen=True)
class WorkerCard:
    """A worker: who it is, and what must be equal on all."""

    rank: int
    host: str
    process_id: int
    size: int
    num_devices: int
    num_replicas: int | None
    script: str
    library: str
    python: str
    torch: str
    # What the links of the first worker were measured to cost, for all workers.
    tuning: str | None = None

    @staticmethod
    def of(
        membership: Membership,
        num_devices: int,
        num_replicas: int | None = None,
        script: str | None = None,
        tuning: str | None = None,
    ) -> WorkerCard:
        """Returns the card of this process."""
        return WorkerCard(
            rank=membership.rank,
            host=socket.gethostname(),
            process_id=os.getpid(),
            size=membership.size,
            num_devices=num_devices,
            num_replicas=num_replicas,
            script=_script(sys.argv[0] if script is None else script),
            library=_version(),
            python=".".join(platform.python_version_tuple()[:2]),
            torch=torch.__version__,
            tuning=tuning,
        )

    @staticmethod
    def from_text(text: str | bytes) -> WorkerCard:
        """Reads what `to_text` has written."""
        return WorkerCard(**json.loads(text))

    def to_text(self) -> str:
        """Returns the card as it lies in a store."""
        return json.dumps(asdict(self))

    def agrees_with(self, other: WorkerCard) -> bool:
        """Returns whether all that must be equal is."""
        return all(getattr(self, fact) == getattr(other, fact) for fact in _FACTS)

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process_id} on {self.host})"


def differences(cards: Sequence[WorkerCard]) -> tuple[list[str], list[int]]:
    """Returns in words what is not equal, and the ranks that are not with the majority."""
    sentences: list[str] = []
    odd: set[int] = set()
    for fact, name in _FACTS.items():
        holders: dict[object, list[int]] = {}
        for card in cards:
            holders.setdefault(getattr(card, fact), []).append(card.rank)
        if len(holders) > 1:
            groups = [f"{value} on {ranks_in_words(ranks)}" for value, ranks in holders.items()]
            sentences.append(f"{name}: {', '.join(groups)}")
            # Of equally many, those with the lowest rank count as right.
            _, *others = sorted(holders.values(), key=lambda ranks: (-len(ranks), min(ranks)))
            odd.update(rank for ranks in others for rank in ranks)
    return sentences, sorted(odd)


def _script(path: str) -> str:
    """The name and a digest of the content; a program given with `-c` has only its name."""
    file = Path(path)
    if not file.is_file():
        return file.name or "(none)"
    return f"{file.name} ({hashlib.sha256(file.read_bytes()).hexdigest()[:8]})"


def _version() -> str:
    try:
        return version("unisono")
    except PackageNotFoundError:
        return "not installed"
