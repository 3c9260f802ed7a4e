import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from keyboard import press_ctrl_c_in
from on_replica import replica, replica_id

import unisono as uo
from unisono.errors import ReplicaMismatchError, UnequalCallsError

# What stops a replica may reach it while the collector calls back somebody, who cannot pass it on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

Make = Callable[..., uo.MirroredStrategy]

# On a busy machine. What is stopped would go on for much longer.
AT_ONCE = 60.0


def wait_in_a_collective() -> None:
    replica().all_reduce("SUM", torch.ones(1))


def compute_for_long() -> None:
    deadline = time.monotonic() + 2 * AT_ONCE
    while time.monotonic() < deadline:
        time.sleep(0.001)


def compute_in_torch() -> None:
    x = torch.ones(50, 50)
    deadline = time.monotonic() + 2 * AT_ONCE
    while time.monotonic() < deadline:
        x = (x @ x).clamp(max=1)


WAYS_TO_BE_BUSY = [wait_in_a_collective, compute_for_long, compute_in_torch]


class Stopwatch:
    def __enter__(self) -> None:
        self.start = time.monotonic()

    def __exit__(self, *_: object) -> None:
        assert time.monotonic() - self.start < AT_ONCE, "the step did not end at once"


def assert_usable(strategy: uo.Strategy) -> None:
    num_replicas = strategy.num_replicas_in_sync

    def step() -> torch.Tensor:
        total: torch.Tensor = replica().all_reduce("SUM", torch.tensor(10 ** replica_id()))
        return total

    for _ in range(2):
        with Stopwatch():
            results = strategy.experimental_local_results(strategy.run(step))
        assert [r.item() for r in results] == [int("1" * num_replicas)] * num_replicas


@pytest.fixture(params=[False, True], ids=["concurrent", "serial"])
def strategy(request: pytest.FixtureRequest, mirrored: Make) -> uo.Strategy:
    return mirrored(3, serial=request.param)


@pytest.mark.parametrize("others", WAYS_TO_BE_BUSY)
def test_an_exception_ends_the_step_at_once(mirrored: Make, others: Callable[[], None]) -> None:
    strategy = mirrored(3)

    def step() -> None:
        if replica_id() == 1:
            time.sleep(0.01)
            raise LookupError("the first real error")
        others()

    for _ in range(3):
        with Stopwatch(), pytest.raises(LookupError, match="the first real error"):
            strategy.run(step)
    assert_usable(strategy)


def test_an_exception_frees_those_who_wait(strategy: uo.Strategy) -> None:
    def step() -> None:
        if replica_id() == 1:
            raise LookupError
        wait_in_a_collective()

    for _ in range(3):
        with Stopwatch(), pytest.raises(LookupError):
            strategy.run(step)
    assert_usable(strategy)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes before Python 3.11")
def test_an_error_names_its_replica(strategy: uo.Strategy) -> None:
    def step() -> None:
        if replica_id() == 1:
            raise LookupError

    with pytest.raises(LookupError) as caught:
        strategy.run(step)

    assert caught.value.__notes__ == ["Raised on replica 1 (cpu:1)."]


def test_an_error_shows_the_line_of_the_step(strategy: uo.Strategy) -> None:
    def step() -> None:
        raise LookupError

    with pytest.raises(LookupError) as caught:
        strategy.run(step)

    assert "step" in [entry.name for entry in caught.traceback]


def test_a_replica_that_returns_early_is_an_error(strategy: uo.Strategy) -> None:
    def step() -> None:
        if replica_id() != 1:
            wait_in_a_collective()

    for _ in range(3):
        with Stopwatch(), pytest.raises(UnequalCallsError, match="replica 1 has returned"):
            strategy.run(step)
    assert_usable(strategy)


def test_different_calls_are_an_error(strategy: uo.Strategy) -> None:
    def step() -> None:
        if replica_id() == 1:
            replica().all_reduce("MEAN", torch.ones(1))
        else:
            replica().all_reduce("SUM", torch.ones(1))

    for _ in range(3):
        with Stopwatch(), pytest.raises(UnequalCallsError, match="same calls in the same order"):
            strategy.run(step)
    assert_usable(strategy)


def test_another_structure_is_an_error(strategy: uo.Strategy) -> None:
    for _ in range(3):
        with Stopwatch(), pytest.raises(ReplicaMismatchError, match="Replica 1"):
            strategy.run(lambda: [0] * replica_id())
    assert_usable(strategy)


@pytest.mark.parametrize("others", WAYS_TO_BE_BUSY)
def test_system_exit_ends_the_step(mirrored: Make, others: Callable[[], None]) -> None:
    strategy = mirrored(3)

    def step() -> None:
        if replica_id() == 2:
            sys.exit(3)
        others()

    with Stopwatch(), pytest.raises(SystemExit) as caught:
        strategy.run(step)
    assert caught.value.code == 3
    assert_usable(strategy)


@pytest.mark.parametrize("work", [compute_for_long, compute_in_torch])
def test_ctrl_c_ends_the_step(mirrored: Make, work: Callable[[], None]) -> None:
    strategy = mirrored(3)

    for _ in range(2):
        with Stopwatch():
            press_ctrl_c_in(lambda: strategy.run(work))
    assert_usable(strategy)


def test_ctrl_c_ends_a_step_in_which_one_computes_and_others_wait(strategy: uo.Strategy) -> None:
    def step() -> None:
        if replica_id() == 0:
            compute_for_long()
        wait_in_a_collective()

    with Stopwatch():
        press_ctrl_c_in(lambda: strategy.run(step))
    assert_usable(strategy)


def test_an_error_cannot_be_swallowed_by_those_who_are_stopped(mirrored: Make) -> None:
    strategy = mirrored()

    def step() -> None:
        if replica_id() == 1:
            raise LookupError
        try:
            wait_in_a_collective()
        except Exception:
            pytest.fail("the stop of a replica looked like an error of its own")

    with pytest.raises(LookupError):
        strategy.run(step)


def test_context_managers_of_stopped_replicas_are_left(mirrored: Make) -> None:
    strategy = mirrored()
    left: list[int] = []
    has_begun = threading.Event()

    def step() -> None:
        if replica_id() == 1:
            has_begun.wait(AT_ONCE)
            raise LookupError
        try:
            has_begun.set()
            compute_for_long()
        finally:
            left.append(replica_id())

    with pytest.raises(LookupError):
        strategy.run(step)
    assert left == [0]


def test_an_error_while_the_backward_pass_runs(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = torch.nn.Linear(2, 2)

    def fail(_: torch.Tensor) -> None:
        if replica_id() == 1:
            raise LookupError("in a hook")

    def step() -> None:
        output = model(torch.ones(3, 2))
        output.register_hook(fail)
        output.sum().backward()

    for _ in range(3):
        with Stopwatch(), pytest.raises(LookupError, match="in a hook"):
            strategy.run(step)
    assert_usable(strategy)


def test_an_error_right_after_replicas_met(mirrored: Make) -> None:
    strategy = mirrored(3)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def step() -> None:
        wait_in_a_collective()
        if replica_id() == 0:
            raise LookupError
        compute_for_long()

    try:
        for _ in range(100):
            with Stopwatch(), pytest.raises(LookupError):
                strategy.run(step)
    finally:
        sys.setswitchinterval(before)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_replicas_that_fail_at_the_same_moment(
    mirrored: Make, monkeypatch: pytest.MonkeyPatch, num_replicas: int
) -> None:
    """The stop of a replica may come at any of its instructions, also those of the engine."""
    strategy = mirrored(num_replicas)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    # A stop that comes in a destructor is printed, and lost: pytest would take it for an error.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    def step() -> None:
        for _ in range(random.randrange(30)):
            pass
        raise LookupError

    def wait_or_fail() -> None:
        if random.random() < 0.5:
            raise LookupError
        wait_in_a_collective()

    try:
        for _ in range(300):
            with pytest.raises(LookupError):
                strategy.run(step)
            with suppress(LookupError):
                strategy.run(wait_or_fail)
    finally:
        sys.setswitchinterval(before)
    assert_usable(strategy)
