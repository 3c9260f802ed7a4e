"""All workers stop after the same step, when one of them learns that it is about to be ended."""

from __future__ import annotations

import functools
import itertools
import logging
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from unisono.arguments import check_callable, check_timeout, in_words
from unisono.communicators import STORE_ERRORS, JobStore, TracedCommunicator
from unisono.errors import ContextError, UnsupportedError, WorkerTimeoutError
from unisono.workers.elastic.leaving import PREEMPTED, READY, READY_ALONE, UNDISTURBED

if TYPE_CHECKING:
    from unisono.workers.elastic import ElasticJob

# How long a worker of an elastic job goes on, since others may be preempted at the same time.
_PATIENCE_SECONDS = 1.0
_LEFT = "left"
# How often a worker asks the store whether another one wants to stop. With many workers, each one
# asks less often, so that rank 0 answers at most this number of questions per second.
_LEAST_PAUSE_SECONDS = 0.5
_MOST_QUESTIONS = 32
_SLICE_SECONDS = 0.1
# How long the end of the program waits for the thread, if rank 0 does not answer.
_LAST_SECONDS = 2.0
_log = logging.getLogger("unisono")
# How many agreements the workers of a communicator have made.
_numbers: weakref.WeakKeyDictionary[TracedCommunicator, itertools.count[int]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True)
class TerminationConfig:
    """How a process learns that it is about to be ended, and how it then leaves.

    SIGTERM is always watched.

    Args:
        termination_watcher_fn: What else announces the end: a function that returns True once it
            is announced, for example `lambda: os.path.exists("stop")`, or a signal, such as
            `signal.SIGUSR1`. A thread calls the function about every half second.
        exit_fn: What leaves the program after saving. None means `sys.exit(0)`. Platforms that
            restart only a program that failed need another status: `lambda: sys.exit(42)`. If it
            returns, the training goes on, except on a worker that has left an elastic job.
        grace_period: The seconds from the announcement to the end. None or 0 means to save and
            leave after the current step. With a longer time, training goes on as long as three
            steps and three saves still fit. If nothing has been saved before, half of the time is
            left for saving.
        save_fn: What saves, on all workers. None means `CheckpointManager.save`.

    Raises:
        UnsupportedError: If an argument has another type.
    """

    termination_watcher_fn: Callable[[], bool] | signal.Signals | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        watcher = self.termination_watcher_fn
        if not (watcher is None or isinstance(watcher, signal.Signals) or callable(watcher)):
            raise UnsupportedError(
                "`termination_watcher_fn` must be a function that returns whether the end is "
                f"announced, or a signal such as `signal.SIGUSR1`, got {in_words(watcher)}."
            )
        for name in ("exit_fn", "save_fn"):
            if getattr(self, name) is not None:
                check_callable(name, getattr(self, name))
        check_timeout("grace_period", self.grace_period)


class Notice:
    """Notes when the end of this process was announced, and says when it is time to leave."""

    def __init__(self, config: TerminationConfig) -> None:
        watcher = config.termination_watcher_fn
        self.step_seconds = 0.0
        self.save_seconds = 0.0
        self.is_leaving = False
        self._config = config
        self._came_at: float | None = None
        self._grace = config.grace_period or 0.0
        self._previous: dict[signal.Signals, Any] = {}
        self._is_announced = None if isinstance(watcher, signal.Signals) else watcher
        # Whether a thread must call `look` now and then.
        self.needs_thread = self._is_announced is not None
        if threading.current_thread() is threading.main_thread():
            own = [watcher] if isinstance(watcher, signal.Signals) else []
            for number in {signal.SIGTERM, *own}:
                self._previous[number] = signal.getsignal(number)
                signal.signal(number, self._note)
        elif self._is_announced is None:
            raise ContextError(
                "The handler was made outside the main thread, where Python cannot watch signals. "
                "Make it in the main thread, or give `TerminationConfig` a "
                "`termination_watcher_fn` that can be called."
            )

    def look(self) -> None:
        """Asks the function whether the end is announced."""
        if self._came_at is None and self._is_announced is not None and self._is_announced():
            self._came_at = time.monotonic()

    def is_due(self) -> bool:
        """Returns whether it is time to save and leave."""
        if self._came_at is None:
            return False
        needed = 3 * (self.step_seconds + self.save_seconds)
        if not self.save_seconds:
            needed = max(needed, self._grace / 2)
        return time.monotonic() >= self._came_at + self._grace - needed

    def sign(self) -> int:
        """Returns what to tell the other workers of an elastic job; see `Departures`."""
        if self._came_at is None:
            return UNDISTURBED
        if not self.is_due():
            return PREEMPTED
        has_waited = time.monotonic() >= self._came_at + _PATIENCE_SECONDS
        return READY_ALONE if has_waited else READY

    def leave(self) -> None:
        """Leaves the program, as the configuration says."""
        self.is_leaving = True
        (self._config.exit_fn or functools.partial(sys.exit, 0))()
        self.is_leaving = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The signal handler. It takes no lock, because the interrupted code may hold it."""
        if self._came_at is None:
            self._came_at = time.monotonic()
        previous = self._previous.get(signal.Signals(number))
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def close(self) -> None:
        """Gives the signals back to the handlers that they had before."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            # None is a handler that was not set by Python, and cannot be set again.
            if previous is not None and signal.getsignal(number) == self._note:
                signal.signal(number, previous)
        self._previous = {}


class Agreement:
    """Says after each step whether it was the last one, and says the same on all workers.

    A worker that wants to stop says so in the store of the job. Every worker then answers with the
    step that it is in, or the next one if it is between two. The greatest answer is the last step:
    every worker can still reach it, and no worker has gone beyond. A thread answers, because the
    program may be waiting for another worker within its step. While nobody wants to stop, a step
    takes a lock twice and sends nothing.
    """

    def __init__(self, notice: Notice, joined: tuple[TracedCommunicator, JobStore] | None) -> None:
        self._notice = notice
        self._others = None if joined is None else _Others(*joined)
        self._lock = threading.Lock()
        self._started = 0
        self._is_in_step = False
        self._answer: int | None = None
        self._last: int | None = None
        self._error: Exception | None = None
        self._is_agreed = threading.Event()
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        if self._others is not None or notice.needs_thread:
            self._thread = threading.Thread(
                target=self._watch, name="unisono preemption", daemon=True
            )
            self._thread.start()

    def begin(self) -> None:
        """Before a step."""
        with self._lock:
            self._started += 1
            self._is_in_step = True

    def fail(self) -> None:
        """After a step that has raised an error, and counts as not begun."""
        with self._lock:
            self._started -= 1
            self._is_in_step = False

    def end(self) -> bool:
        """After a step. Returns whether it was the last one."""
        with self._lock:
            self._is_in_step = False
            if self._error is not None:
                raise self._error
            if self._answer is None and self._notice.is_due():
                self._answer = self._started
                if self._others is None:
                    self._last = self._answer
            if self._answer is None or self._started < self._answer:
                return False
        if self._others is not None:
            self._others.wait_for(self._is_agreed)
        return self._started == self._last

    def close(self) -> None:
        """Ends the thread, and tells the other workers that this one runs no more steps."""
        self._is_closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LAST_SECONDS)

    def _watch(self) -> None:
        """The thread: learns that this worker or another one is to stop, and answers."""
        try:
            while not self._is_asked():
                if self._is_closed.is_set():
                    if self._others is not None:
                        self._others.answer(_LEFT)
                    return
            if self._others is not None:
                with self._lock:
                    if self._answer is None:
                        self._answer = self._started + (0 if self._is_in_step else 1)
                self._others.answer(str(self._answer))
                self._last = self._others.last_step(self._is_closed)
        except STORE_ERRORS as error:
            # Rank 0 has ended. If it was lost, the next collective says so.
            _log.debug("No news about preemption any more: %s", error)
        except Exception as error:
            self._error = error
        finally:
            self._is_agreed.set()

    def _is_asked(self) -> bool:
        """Waits a moment, and returns whether this worker or another one is to stop."""
        pause = _LEAST_PAUSE_SECONDS if self._others is None else self._others.pause
        pause_ends = time.monotonic() + pause
        while time.monotonic() < pause_ends and not self._is_closed.wait(_SLICE_SECONDS):
            # The program has come to the end of a step, and waits.
            if self._answer is not None:
                break
        self._notice.look()
        is_due = self._answer is not None or self._notice.is_due()
        return is_due if self._others is None else self._others.ask(is_due=is_due)


class ElasticAgreement(Agreement):
    """The same for an elastic job, whose workers tell each other with every run.

    A worker that is to stop leaves, and the others go on. Only where too few would be left is the
    step the last one.
    """

    def __init__(self, notice: Notice, job: ElasticJob) -> None:
        super().__init__(notice, None)
        self._job = job
        job.departures.ending = notice

    def end(self) -> bool:
        """After a step. Returns whether it was the last one of all workers."""
        with self._lock:
            self._is_in_step = False
            if self._error is not None:
                raise self._error
        if not self._job.let_go():
            return False
        self._job.departures.numbers.clear()
        return True

    def close(self) -> None:
        """Ends the thread, if there is one. Nothing tells this worker any more that it ends."""
        self._job.departures.ending = None
        super().close()


class _Others:
    """The other workers, which are asked through the store of the job."""

    def __init__(self, communicator: TracedCommunicator, store: JobStore) -> None:
        self._communicator = communicator
        self._store = store
        number = next(_numbers.setdefault(communicator, itertools.count()))
        self._key = f"preemption/{communicator.group}/{number}"
        self.pause = max(_LEAST_PAUSE_SECONDS, communicator.size / _MOST_QUESTIONS)

    def ask(self, *, is_due: bool) -> bool:
        """Says whether this worker is to stop, and returns whether any is."""
        return self._store.add(f"{self._key}/asked", int(is_due)) > 0

    def answer(self, text: str) -> None:
        """Says how far this worker goes."""
        self._store.set(f"{self._key}/{self._communicator.rank}", text)

    def last_step(self, is_closed: threading.Event) -> int | None:
        """Waits for all answers. Returns the last step, or None if a worker has finished."""
        keys = [f"{self._key}/{rank}" for rank in range(self._communicator.size)]
        while not self._store.check(keys):
            if is_closed.wait(_SLICE_SECONDS):
                return None
        answers = [one.decode() for one in self._store.multi_get(keys)]
        if _LEFT in answers:
            _log.warning("A worker has already finished its training, so this one finishes it too.")
            return None
        return max(map(int, answers))

    def wait_for(self, is_agreed: threading.Event) -> None:
        """Waits until all workers have answered, or one of them is lost."""
        one = self._communicator
        seconds = one.timeout_seconds or float("inf")
        deadline = time.monotonic() + seconds
        while not is_agreed.wait(_SLICE_SECONDS):
            one.check_health()
            if time.monotonic() > deadline:
                raise WorkerTimeoutError(
                    f"Rank {one.rank} waited {seconds:g} s for all workers to agree on the last "
                    "step. Look at the logs of the other workers.",
                    [other for other in range(one.size) if other != one.rank],
                )
