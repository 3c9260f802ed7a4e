"""Where did the step go: the shares of each replica's time, and who the others waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import median
from typing import Any, NamedTuple

from unisono.errors import TraceError
from unisono_tools.traces.files import WorkerTrace, check_workers
from unisono_tools.traces.replicas import Spent, WorkerTime
from unisono_tools.traces.segments import blocks


@dataclass
class Shares:
    """Where the time of a replica went, in nanoseconds.

    Attributes:
        compute: Its own work, and updates that are made once for all.
        communication: Reductions, copies and collectives during which it did nothing else.
        waiting: Waiting for the slowest replica or worker, and waking up after it.
        input: Waiting for the next batch.
        other: Starting and ending the step.
    """

    compute: int = 0
    communication: int = 0
    waiting: int = 0
    input: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())

    def in_seconds(self) -> dict[str, float]:
        """Returns each share in seconds, by a name that says so."""
        return {f"{name}_seconds": value / 1e9 for name, value in asdict(self).items()}

    def __add__(self, other: Shares) -> Shares:
        added = {key: value + getattr(other, key) for key, value in asdict(self).items()}
        return Shares(**added)


class Straggler(NamedTuple):
    """The replica or worker that the others waited for most.

    Attributes:
        worker: Its rank.
        replica: Its number among those of all workers; None if only the worker is known.
        waited: How long the others waited for it in total, in nanoseconds.
        share: That as a part of all waiting.
    """

    worker: int
    replica: int | None
    waited: int
    share: float

    def __str__(self) -> str:
        name = f"worker {self.worker}" if self.replica is None else f"replica {self.replica}"
        where = "" if self.replica is None else f" on worker {self.worker}"
        return (
            f"{name}{where}, for which the others waited {self.waited / 1e6:.1f} ms, "
            f"{self.share:.0%} of all waiting"
        )


@dataclass
class Summary:
    """Where the time of the steps went.

    Attributes:
        num_workers: The number of workers that recorded something.
        missing: The ranks without a file.
        num_steps: How many steps the first worker has recorded; 0 for a program that uses the
            backend of torch.distributed without a strategy.
        num_dropped: How many events were dropped.
        replicas: The shares of each replica, by its number among those of all workers. Without
            steps, every worker counts as one replica.
        straggler: Who was waited for most; None if nobody waited.
        interpreter: The part of a step in which replicas waited for Python's interpreter lock, the
            median of the steps in which it was measured; None if there is none.
    """

    num_workers: int
    missing: list[int]
    num_steps: int
    num_dropped: int
    replicas: dict[int, Shares] = field(default_factory=dict)
    straggler: Straggler | None = None
    interpreter: float | None = None

    @property
    def total(self) -> Shares:
        """The shares of all replicas together."""
        return sum(self.replicas.values(), Shares())

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON values. The names of times end in `_seconds`."""
        straggler = None if self.straggler is None else self.straggler._asdict()
        if straggler is not None:
            straggler["waited_seconds"] = straggler.pop("waited") / 1e9
        return {
            "num_workers": self.num_workers,
            "missing": self.missing,
            "num_steps": self.num_steps,
            "num_dropped": self.num_dropped,
            "replicas": {number: shares.in_seconds() for number, shares in self.replicas.items()},
            "total": self.total.in_seconds(),
            "straggler": straggler,
            "interpreter_share": self.interpreter,
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterable[str]:
        columns = [one.name for one in fields(Shares)]
        count = max(1, self.num_steps)
        workers = _many(self.num_workers, "worker")
        if self.num_steps:
            row, unit = "replica", "ms per step"
            steps, replicas = _many(self.num_steps, "step"), _many(len(self.replicas), "replica")
            yield f"Where did the step go: {steps}, {replicas}, {workers}"
        else:
            row, unit = "worker", "ms in all"
            yield f"Where did the time between the first and the last collective go: {workers}"
        widths = [max(len(name), 7) + 2 for name in columns]
        heads = [f"{name:>{width}}" for name, width in zip(columns, widths, strict=True)]
        yield f"{'':<12}" + "".join(heads) + f"{unit:>13}"
        rows = {f"{row} {number}": shares for number, shares in self.replicas.items()}
        mean = self.total.total / max(1, len(rows))
        for name, shares in {**rows, "all": self.total}.items():
            parts = [getattr(shares, column) / max(1, shares.total) for column in columns]
            spent = mean if name == "all" else shares.total
            yield (
                f"{name:<12}"
                + "".join(f"{part:>{w}.1%}" for part, w in zip(parts, widths, strict=True))
                + f"{spent / count / 1e6:>13.3f}"
            )
        yield f"Straggler: {self.straggler or 'none, nobody waited'}."
        if self.interpreter is not None:
            yield f"Waiting for the interpreter: {self.interpreter:.0%} of a step."
        if self.missing:
            yield f"There is no file of worker {', '.join(map(str, self.missing))}."
        if self.num_dropped:
            yield f"{self.num_dropped} early events were dropped, for want of room."


def summarise(workers: Sequence[WorkerTrace]) -> Summary:
    """Sums up the traces of all `workers`, which must be on one clock; see `align`.

    Raises:
        TraceError: If neither a step nor a collective was recorded.
    """
    check_workers(workers)
    blocked = blocks(workers)
    times = {worker.rank: WorkerTime(worker, blocked[worker.rank]) for worker in workers}
    num_local = max((time.num_replicas for time in times.values()), default=0)
    has_collectives = any(e.category == "collective" for w in workers for e in w.events())
    if num_local == 0 and not has_collectives:
        raise TraceError(
            "The trace holds no step and no collective: neither `Strategy.run` nor a collective of "
            "the backend was called during the recording. Record some training steps."
        )
    first = workers[0]
    summary = Summary(
        num_workers=len(workers),
        missing=[r for r in range(first.size) if r not in times],
        num_steps=times[first.rank].num_steps,
        num_dropped=sum(worker.num_dropped for worker in workers),
        interpreter=_interpreter(workers),
    )
    waited_for: Counter[tuple[int, int | None]] = Counter()
    spent = {
        rank * num_local + local_id: list(time.spent(local_id))
        for rank, time in times.items()
        for local_id in range(time.num_replicas)
    } or {rank: list(time.spent_around_collectives()) for rank, time in times.items()}
    for number, pieces in spent.items():
        summary.replicas[number] = _shares(pieces)
        for one in pieces:
            if one.waited_for is not None:
                waited_for[one.waited_for] += one.duration
    summary.straggler = _straggler(waited_for, num_local, summary.total.waiting)
    return summary


def _interpreter(workers: Sequence[WorkerTrace]) -> float | None:
    measured = [
        float(event.arguments["share"])
        for worker in workers
        for event in worker.events()
        if event.category == "interpreter"
    ]
    return median(measured) if measured else None


def _shares(spent: Iterable[Spent]) -> Shares:
    totals = Counter[str]()
    for one in spent:
        totals[one.kind] += one.duration
    return Shares(**totals)


def _straggler(
    waited_for: Counter[tuple[int, int | None]], num_local: int, all_waiting: int
) -> Straggler | None:
    blamed: Counter[tuple[int, int | None]] = Counter()
    for (worker, local_id), waited in waited_for.items():
        if local_id is None:
            local_id = _slowest(waited_for, worker, num_local)
        blamed[worker, local_id] += waited
    if not blamed:
        return None
    (worker, local_id), waited = blamed.most_common(1)[0]
    replica = None if local_id is None else worker * num_local + local_id
    return Straggler(worker, replica, waited, waited / all_waiting)


def _slowest(
    waited_for: Counter[tuple[int, int | None]], worker: int, num_local: int
) -> int | None:
    """Returns the replica that the other replicas of its worker wait for most."""
    if num_local == 1:
        return 0
    own = {
        local_id: waited
        for (rank, local_id), waited in waited_for.items()
        if rank == worker and local_id is not None
    }
    return max(own, key=own.__getitem__, default=None)


def _many(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
