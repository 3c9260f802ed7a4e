"""The first meeting: all workers come, show their cards, and find that they belong together.

In the store lie:

    claim/RANK      how many call themselves so
    card/RANK       what the first of them says of itself
    present         how many have said something
    fits            how many agree with rank 0
    misfits         how many do not, or found their rank taken; misfit/NUMBER holds their cards
    read            how many have read all cards
    leaving         how many have given up

A worker of another job, or with another token, does not come as far as this: the store refuses it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from unisono.cluster.membership import Membership
from unisono.communicators import JOB_TOKEN, coordinator_store, translated_store_errors
from unisono.communicators.headers import ranks_in_words
from unisono.errors import JobMismatchError, WorkerTimeoutError

# Between two looks at the store; longer and longer, so that rank 0 can serve a thousand workers.
_FIRST_PAUSE_SECONDS = 0.01
_LAST_PAUSE_SECONDS = 0.25
# How long to wait for more news once something is wrong, so that the message names everybody.
_GRACE_SECONDS = 1.0
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
            script=_script(sys.argv[0]),
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


def meet(store: Store, card: WorkerCard, timeout_seconds: float) -> tuple[WorkerCard, ...]:
    """Waits for all workers of the job, and checks that they belong together."""
    with translated_store_errors():
        return _Meeting(store, card, timeout_seconds).hold()


def was_left(store: Store) -> bool:
    """Whether a worker has given up, so that a worker that joins now is too late."""
    return store.add("leaving", 0) > 0


class _Meeting:
    def __init__(self, store: Store, card: WorkerCard, timeout_seconds: float) -> None:
        self._store = store
        self._card = card
        self._start = time.monotonic()
        self._deadline = self._start + timeout_seconds
        self._fits = False

    def hold(self) -> tuple[WorkerCard, ...]:
        self._present()
        self._wait_until(
            lambda: self._all_fit() or self._count("misfits") > 0 or was_left(self._store)
        )
        if not self._all_fit():
            self._leave(self._mismatch() if self._count("misfits") else self._absence())
        cards = self._store.multi_get([f"card/{rank}" for rank in range(self._card.size)])
        self._store.add("read", 1)
        if self._card.rank == 0:
            # It may end at once, and the store with it.
            self._wait_until(lambda: self._count("read") >= self._card.size)
        return tuple(map(WorkerCard.from_text, cards))

    def _present(self) -> None:
        """Takes the rank, and tells everybody at once if that or something else is wrong."""
        rank = self._card.rank
        is_first = self._store.add(f"claim/{rank}", 1) == 1
        if is_first:
            self._store.set(f"card/{rank}", self._card.to_text())
        else:
            self._report_misfit()
        # Only now: who counts the workers that are present can read what they say.
        self._store.add("present", 1)
        if is_first:
            self._compare_with_rank_0()

    def _compare_with_rank_0(self) -> None:
        self._wait_until(lambda: self._is_there("card/0") or was_left(self._store))
        if not self._is_there("card/0"):
            self._leave(self._absence())
        self._fits = not differences([self._read("card/0"), self._card])[0]
        if self._fits:
            self._store.set(f"fits/{self._card.rank}", "")
            self._store.add("fits", 1)
        else:
            self._report_misfit()

    def _report_misfit(self) -> None:
        number = self._store.add("misfits", 1)
        self._store.set(f"misfit/{number}", self._card.to_text())

    def _mismatch(self) -> JobMismatchError:
        self._deadline = min(self._deadline, time.monotonic() + _GRACE_SECONDS)
        # One that counts too few workers waits for the same number as rank 0.
        first = self._read("card/0") if self._is_there("card/0") else self._card
        size = max(self._card.size, first.size)
        self._wait_until(lambda: self._count("present") >= size)
        present = [rank for rank in range(size) if self._is_there(f"card/{rank}")]
        cards = [self._read(f"card/{rank}") for rank in present]
        misfits = [self._read(f"misfit/{n}") for n in range(1, self._count("misfits") + 1)]
        sentences, ranks = differences([*cards, *(m for m in misfits if m.rank not in present)])
        taken = [
            (misfit, card)
            for misfit in misfits
            for card in cards
            if misfit.rank == card.rank and str(misfit) != str(card)
        ]
        sentences += [
            f"rank {one.rank}, which is there twice: {card} and {one}" for one, card in taken
        ]
        return JobMismatchError(
            f"The workers do not belong to one job: they differ in {'; '.join(sentences)}. Start "
            "all of them with the same script, versions and number of workers, and give each its "
            "own rank.",
            ranks=sorted({*ranks, *(misfit.rank for misfit, _ in taken)}),
        )

    def _absence(self) -> WorkerTimeoutError:
        waited = time.monotonic() - self._start
        missing = [rank for rank in range(self._card.size) if not self._is_there(f"card/{rank}")]
        if not missing:
            others = [rank for rank in range(self._card.size) if rank != self._card.rank]
            silent = [rank for rank in others if not self._is_there(f"fits/{rank}")]
            if silent:
                return WorkerTimeoutError(
                    f"Rank {self._card.rank} has waited {waited:.1f} s for "
                    f"{ranks_in_words(silent)} of {self._card.size}, which started, but ended or "
                    "stopped before all workers were connected. Check the logs of these workers.",
                    ranks=silent,
                )
            return WorkerTimeoutError(
                f"Rank {self._card.rank} has waited {waited:.1f} s for all {self._card.size} "
                "workers to start. All of them started, but some gave up before the last one did. "
                "Start them closer together, or raise `timeout_seconds`."
            )
        door = coordinator_store(self._store)
        refused = [
            f" Rank {rank}, {door.get(f'refused/{rank}').decode()}, was refused because it belongs "
            f"to another job or has another {JOB_TOKEN}."
            for rank in missing
            if door.check([f"refused/{rank}"])
        ]
        verb = "has" if len(missing) == 1 else "have"
        return WorkerTimeoutError(
            f"Rank {self._card.rank} has waited {waited:.1f} s for all {self._card.size} workers "
            f"to start, and {ranks_in_words(missing)} {verb} not connected.{''.join(refused)} "
            "Check that they were started, and that they can reach the address of rank 0.",
            ranks=missing,
        )

    def _leave(self, error: Exception) -> NoReturn:
        """Raises the error; rank 0, who may keep the store, only after the others have read it."""
        self._store.add("leaving", 1)
        if self._card.rank == 0:
            self._deadline = time.monotonic() + 2 * _GRACE_SECONDS
            self._wait_until(lambda: self._count("leaving") >= self._count("present"))
        raise error

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Looks again and again: a wait inside of the store would not hear Ctrl-C."""
        pause = _FIRST_PAUSE_SECONDS
        while not condition() and time.monotonic() < self._deadline:
            time.sleep(pause)
            pause = min(1.5 * pause, _LAST_PAUSE_SECONDS)

    def _all_fit(self) -> bool:
        # Who has left counts as one that fits, and would be waited for in vain.
        is_whole = self._fits and self._count("fits") >= self._card.size
        return is_whole and not was_left(self._store)

    def _count(self, key: str) -> int:
        return self._store.add(key, 0)

    def _is_there(self, key: str) -> bool:
        return self._store.check([key])

    def _read(self, key: str) -> WorkerCard:
        return WorkerCard.from_text(self._store.get(key))
