"""What may happen to an elastic job, drawn at random: who is killed or cut off, and when."""

from __future__ import annotations

import math
import random
import tempfile
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path

from processes.elastic_programs import HOOKS_WITH_STATE, POINTS, POINTS_OF_UPDATES, Program
from unisono.experimental import CommunicationImplementation

MOST_WORKERS = 6
COMING = ("return", "join")
# A point in a run: a worker that joins is getting the state.
JOINS = "when another gets the state"
# Long enough for a busy machine, and short enough to wait for.
HARSH_SECONDS, USUAL_SECONDS = 6.0, 40.0
_IMPLEMENTATIONS = (
    CommunicationImplementation.AUTO,
    CommunicationImplementation.TCP,
    CommunicationImplementation.RING,
)


@dataclass(frozen=True)
class Event:
    """What happens to a worker or to its host.

    Attributes:
        kind: "kill", "leave" of one that is preempted, "pause", "return" of one that was killed or
            has left, "join" of a new one, "cut" of its host from the others, "mute" of its host,
            which then hears but is not heard, or "reconnect".
        worker: Which one.
        run: In which of its runs; the others wait there for one that comes.
        point: Where in the run; "" for some time after its begin.
        seconds: How long after the begin.
        lasting: How long a worker is paused or a host is cut off. For a worker that is preempted,
            how long its step takes then.
    """

    kind: str
    worker: int
    run: int
    point: str = ""
    seconds: float = 0.0
    lasting: float = 0.0


@dataclass(frozen=True)
class History:
    """What a job goes through.

    Attributes:
        seed: What it was drawn with.
        num_workers: How many workers there are at first.
        program: What they train.
        implementation: What connects them.
        events: What happens.
        places: The hosts of all workers, also of one that joins.
        name: One that no other history has.
    """

    seed: int
    num_workers: int
    program: Program
    implementation: CommunicationImplementation
    events: tuple[Event, ...]
    places: tuple[int, ...]
    name: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def is_harsh(self) -> bool:
        """Whether workers may be given up that live, or nobody may be allowed to go on."""
        killed = {one.worker for one in self.events if one.kind == "kill"}
        kept = {self.places[one] for one in range(self.num_workers) if one not in killed}
        # No worker sees when a process of another host ends.
        is_host_lost = kept < set(self.places[: self.num_workers])
        return is_host_lost or any(one.lasting >= HARSH_SECONDS / 3 for one in self.events)

    @property
    def may_lose_states(self) -> bool:
        """Whether workers may be lost at once that had what a hook keeps for their replicas."""
        num_killed = len([one for one in self.events if one.kind == "kill"])
        return self.program.hook in HOOKS_WITH_STATE and (self.is_harsh or num_killed > 1)

    @property
    def has_preemptions(self) -> bool:
        """Whether workers are to leave."""
        return any(one.kind == "leave" for one in self.events)

    def key(self, worker: int) -> str:
        """What is in the store of the crew when nobody needs to wait for a worker that comes."""
        return f"{self.name} {worker} has knocked"

    @property
    def folder(self) -> Path:
        """Where a checkpoint may be saved."""
        return Path(tempfile.gettempdir(), f"unisono-{self.name}")

    @property
    def timeout_seconds(self) -> float:
        """How long workers wait for each other."""
        return HARSH_SECONDS if self.is_harsh else USUAL_SECONDS

    @staticmethod
    def drawn(seed: int, num_hosts: int = 1) -> History:
        """Draws one."""
        rng = random.Random(seed)
        num_workers = rng.randint(2, MOST_WORKERS)
        num_replicas = rng.randint(num_workers, min(4 * num_workers, 10))
        program = Program.drawn(rng, num_replicas)
        num_killed = rng.randint(1, num_workers - 1)
        killed = rng.sample(range(num_workers), num_killed)
        events = [_killed(rng, worker, program.num_runs) for worker in killed]
        if num_killed > 1 and rng.random() < 0.3:
            # Two at about the same time: the second one while the others meet.
            events[1] = Event("kill", killed[1], events[0].run, "", rng.random() * 0.5)
        for worker in rng.sample(range(num_workers), rng.choice((0, 0, 1, 1, 2))):
            events.append(_paused(rng, worker, program.num_runs))
        for event in events[:num_killed]:
            later = range(event.run + 1, program.num_runs)
            if later and rng.random() < 0.4:
                events.append(Event("return", event.worker, rng.choice(later)))
        if num_workers < min(num_replicas, MOST_WORKERS) and rng.random() < 0.4:
            events.append(Event("join", num_workers, rng.randrange(1, program.num_runs)))
        runs = [event.run for event in events if event.kind in COMING]
        left = sorted(set(range(num_workers)) - set(killed))
        if runs and len(left) > 1 and rng.random() < 0.5:
            events.append(Event("kill", rng.choice(left), rng.choice(runs), JOINS))
        implementation = rng.choice(_IMPLEMENTATIONS)
        if rng.random() < 0.3:
            events = [_preempted(rng, one) if one.kind == "kill" else one for one in events]
        if num_hosts > 1:
            if rng.random() < 0.5:
                # A cut is enough; what is killed besides may leave nobody who may go on.
                spared = killed[: rng.randrange(num_killed + 1)]
                gone = [event for event in events if event.worker in spared]
                events = [one for one in events if one.kind == "pause" or one not in gone]
            for _ in range(rng.choice((0, 1, 1, 2))):
                events.append(_cut(rng, num_workers, program.num_runs))
        elif rng.random() < 0.1:
            worker = rng.randrange(num_workers)
            events.append(_paused(rng, worker, program.num_runs, lasting=2 * HARSH_SECONDS))
        watches = any(event.point in POINTS_OF_UPDATES for event in events)
        return History(
            seed,
            num_workers,
            replace(program, watches_updates=watches),
            implementation,
            tuple(events),
            # The last place is that of the one that joins.
            (*(one * num_hosts // num_workers for one in range(num_workers)), num_hosts - 1),
        )


def _killed(rng: random.Random, worker: int, num_runs: int) -> Event:
    run = rng.randrange(num_runs)
    if rng.random() < 0.5:
        return Event("kill", worker, run, rng.choice(POINTS))
    return Event("kill", worker, run, "", rng.random() * rng.choice((0.005, 0.05, 0.3)))


def _preempted(rng: random.Random, event: Event) -> Event:
    """Perhaps this instead. After a second, a preempted worker waits no longer for others."""
    if event.point == JOINS or rng.random() < 0.3:
        return event
    point = event.point or "before the run"
    return Event("leave", event.worker, event.run, point, lasting=rng.choice((0.0, 1.1, 1.1)))


def _paused(rng: random.Random, worker: int, num_runs: int, lasting: float | None = None) -> Event:
    seconds = rng.choice((0.1, 0.5, 1.5)) * rng.random() if lasting is None else lasting
    return Event("pause", worker, rng.randrange(num_runs), rng.choice(POINTS), lasting=seconds)


def _cut(rng: random.Random, num_workers: int, num_runs: int) -> Event:
    return Event(
        rng.choice(("cut", "mute")),
        rng.randrange(num_workers),
        rng.randrange(num_runs),
        "",
        rng.random() * rng.choice((0.005, 0.05, 0.3)),
        rng.choice((0.1, 0.5, 1.5, HARSH_SECONDS, 2 * HARSH_SECONDS, math.inf)),
    )
