"""A process that gets SIGTERM: it finishes its step, saves and leaves."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from unisono.checkpoints import agreement
from unisono.cluster_resolver import SimpleClusterResolver
from unisono.errors import ClusterError, ContextError, UnsupportedError
from unisono.experimental import (
    Checkpoint,
    CheckpointManager,
    PreemptionCheckpointHandler,
    TerminationConfig,
)
from unit.checkpoints.training import Training, are_equal

# A notice by a function or a file is seen within half a second; the limit is for busy machines.
DEADLINE_SECONDS = 60.0


@pytest.fixture(autouse=True)
def same_signals() -> Iterator[None]:
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    assert {one: signal.getsignal(one) for one in before} == before


def tell(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def run_until_it_leaves(handler: PreemptionCheckpointHandler, step: Callable[[], Any]) -> int:
    """Runs steps until the handler leaves, and returns the exit status."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    with pytest.raises(SystemExit) as left:
        while time.monotonic() < deadline:
            handler.run(step)
    return int(left.value.code or 0)


def test_sigterm_ends_a_training_after_its_step_and_it_resumes_to_the_same_bits(
    tmp_path: Path,
) -> None:
    results = []
    for told_at in (None, 4):
        folder = tmp_path / str(told_at)
        for _ in range(1 if told_at is None else 2):
            training = Training()
            handler = PreemptionCheckpointHandler(
                training.strategy.cluster_resolver, training.checkpoint, folder
            )
            left = train(training, handler, told_at)
            results.append((left, handler.total_run_calls, training.result()))
            handler.close()
            training.strategy.close()

    undisturbed, stopped, resumed = results
    assert [one[:2] for one in results] == [(None, 10), (0, 4), (None, 10)]
    assert not are_equal(stopped[2], undisturbed[2])
    assert are_equal(resumed[2], undisturbed[2])


def train(
    training: Training, handler: PreemptionCheckpointHandler, told_at: int | None
) -> int | None:
    """Trains ten steps, and returns the exit status if the handler has left."""
    resumed_at = handler.total_run_calls

    def step(*batch: Any) -> None:
        training.step(*batch)
        if resumed_at == 0 and handler.total_run_calls + 1 == told_at:
            tell()

    try:
        while handler.total_run_calls < 10:
            for batch in training.batches:
                handler.run(step, *batch)
    except SystemExit as left:
        return int(left.code or 0)
    return None


def test_arguments_and_results_pass_through(tmp_path: Path) -> None:
    handler = PreemptionCheckpointHandler(None, Checkpoint(), tmp_path)

    assert handler.run(lambda a, *, b: a + b, 1, b=2) == 3
    with handler.watch_preemption_scope():
        pass
    handler.save_checkpoint_if_preempted()
    with pytest.raises(ZeroDivisionError):
        handler.run(lambda: 1 // 0)

    assert handler.total_run_calls == 3
    assert not list(tmp_path.iterdir())
    handler.close()


def test_an_own_signal_and_the_previous_handlers_are_called(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    config = TerminationConfig(termination_watcher_fn=signal.SIGUSR1)
    handler = PreemptionCheckpointHandler(None, Checkpoint(), tmp_path, config)

    status = run_until_it_leaves(handler, lambda: tell(signal.SIGUSR1))
    # A platform may insist.
    tell()

    assert (status, handler.total_run_calls, heard) == (0, 1, [signal.SIGUSR1])
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt-1.pt"]
    handler.close()
    signal.signal(signal.SIGUSR1, before)


def test_a_file_that_appears_ends_the_training_with_the_status_that_was_asked_for(
    tmp_path: Path,
) -> None:
    told = tmp_path / "stop"
    saved: list[str] = []

    def leave() -> None:
        raise SystemExit(42)

    config = TerminationConfig(
        termination_watcher_fn=told.exists, exit_fn=leave, save_fn=lambda: saved.append("saved")
    )
    handler = PreemptionCheckpointHandler(None, Checkpoint(), tmp_path / "saved", config)

    def step() -> None:
        told.touch()
        time.sleep(0.01)

    status = run_until_it_leaves(handler, step)

    assert (status, saved) == (42, ["saved"])
    handler.close()


def test_an_error_of_the_watcher_is_raised_by_the_next_step(tmp_path: Path) -> None:
    config = TerminationConfig(termination_watcher_fn=lambda: bool(1 // 0))
    handler = PreemptionCheckpointHandler(None, Checkpoint(), tmp_path, config)
    deadline = time.monotonic() + DEADLINE_SECONDS

    with pytest.raises(ZeroDivisionError):
        while time.monotonic() < deadline:
            handler.run(time.sleep, 0.01)

    handler.close()


def test_training_goes_on_within_the_grace_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(agreement, "time", SimpleNamespace(monotonic=lambda: now[0]))
    config = TerminationConfig(grace_period=4000, exit_fn=lambda: None)
    manager = CheckpointManager(Checkpoint(), tmp_path, max_to_keep=None)
    handler = PreemptionCheckpointHandler(None, manager, termination_config=config)
    num_saved = []
    tell()

    # Nothing has been saved before, so half of the time is left for saving.
    for now[0] in (101.0, 2000.0, 2101.0, 2102.0):
        handler.run(lambda: None)
        num_saved.append(len(manager.checkpoints))

    # `exit_fn` has returned, so training goes on, and saves no more.
    assert num_saved == [0, 0, 1, 1]
    handler.close()


def test_outside_the_main_thread_a_function_must_announce_the_end(tmp_path: Path) -> None:
    errors: list[Exception] = []

    def make() -> None:
        try:
            PreemptionCheckpointHandler(None, Checkpoint(), tmp_path)
        except ContextError as error:
            errors.append(error)
        config = TerminationConfig(termination_watcher_fn=lambda: False)
        PreemptionCheckpointHandler(None, Checkpoint(), tmp_path, config).close()

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()

    assert "main thread" in str(errors[0])


def test_a_handler_that_is_forgotten_gives_the_signals_back_and_ends_its_thread(
    tmp_path: Path,
) -> None:
    config = TerminationConfig(termination_watcher_fn=lambda: False)
    handler = PreemptionCheckpointHandler(None, Checkpoint(), tmp_path, config)
    threads = [one for one in threading.enumerate() if one.name == "unisono preemption"]

    del handler

    assert threads
    assert not [one for one in threads if one.is_alive()]


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    manager = CheckpointManager(Checkpoint(), tmp_path, max_to_keep=1)
    workers = SimpleClusterResolver(
        {"worker": ["localhost:1", "localhost:2"]}, task_type="worker", task_id=1
    )

    with pytest.raises(UnsupportedError, match="checkpoint_dir"):
        PreemptionCheckpointHandler(None, Checkpoint())
    with pytest.raises(UnsupportedError, match="checkpoint_dir"):
        PreemptionCheckpointHandler(None, manager, tmp_path)
    with pytest.raises(UnsupportedError, match="checkpoint_or_checkpoint_manager"):
        PreemptionCheckpointHandler(None, {"model": 1}, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match="worker 1 of 2"):
        PreemptionCheckpointHandler(workers, Checkpoint(), tmp_path)
    with pytest.raises(UnsupportedError, match="termination_watcher_fn"):
        TerminationConfig(termination_watcher_fn="stop")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="grace_period"):
        TerminationConfig(grace_period=-1)


def test_a_checkpoint_that_does_not_fit_leaves_the_signals_as_they_were(tmp_path: Path) -> None:
    CheckpointManager(Checkpoint(), tmp_path, max_to_keep=1).save()
    before = signal.getsignal(signal.SIGTERM)

    with pytest.raises(UnsupportedError, match="model"):
        PreemptionCheckpointHandler(None, Checkpoint(model=nn.Linear(1, 1)), tmp_path)

    assert signal.getsignal(signal.SIGTERM) == before
