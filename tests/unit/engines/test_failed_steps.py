"""A failed step leaves nothing behind: no memory, no threads, no modes."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
from on_replica import replica
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import BaseTorchDispatchMode

import unisono as uo
from unisono.torch_private import num_dispatch_modes, num_function_modes


class Held:
    """Stands for what a step uses: a weak reference tells whether it is still in memory."""


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def fail_everywhere(x: Tensor, model: nn.Module) -> None:
    raise ValueError("no")


def fail_while_others_wait(x: Tensor, model: nn.Module) -> None:
    if replica().local_id == 1:
        raise ValueError("no")
    replica().all_reduce("SUM", x)


def fail_after_backward(x: Tensor, model: nn.Module) -> None:
    model(x).sum().backward()
    raise ValueError("no")


def fail_in_a_merge(x: Tensor, model: nn.Module) -> None:
    def merge(strategy: uo.Strategy, x: Tensor) -> None:
        raise ValueError("no")

    replica().merge_call(merge, (x,))


def call_unequally(x: Tensor, model: nn.Module) -> None:
    if replica().local_id == 1:
        replica().all_reduce("SUM", x)


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    "fail",
    [
        fail_everywhere,
        fail_while_others_wait,
        fail_after_backward,
        fail_in_a_merge,
        call_unequally,
    ],
)
def test_failed_steps_keep_nothing_in_memory(fail: Callable[[Tensor, nn.Module], None]) -> None:
    strategy = uo.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = nn.Linear(3, 3)
    used: list[weakref.ref[Held]] = []

    def step(x: Tensor) -> None:
        held = Held()
        used.append(weakref.ref(held))
        fail(x, model)

    def run() -> None:
        with suppress(ValueError, uo.errors.UnequalCallsError):
            strategy.run(step, (torch.ones(2, 3),))

    run()
    num_threads = threading.active_count()
    for _ in range(30):
        run()
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        # Without the interpreter lock, a thread frees what it has made when it runs again. An error
        # leads from objects of one thread to objects of another, and back.
        for _ in range(10):
            strategy.run(lambda: None)

    assert len(used) >= 31
    assert [one() for one in used if one() is not None] == []
    assert threading.active_count() == num_threads
    strategy.close()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes before Python 3.11")
def test_an_error_that_is_raised_again_gets_its_note_once() -> None:
    strategy = uo.MirroredStrategy(["cpu:0", "cpu:1"])
    error = ValueError("no")

    def step() -> None:
        if replica().local_id == 1:
            raise error

    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            strategy.run(step)

    strategy.close()
    assert len(error.__notes__) == 1


def num_modes() -> tuple[int, int]:
    return num_function_modes(), num_dispatch_modes()


@pytest.mark.parametrize("failing", [0, 1])
def test_no_replica_of_a_failed_step_stays_in_a_mode(failing: int) -> None:
    strategy = uo.MirroredStrategy(["cpu:0", "cpu:1"])

    def step() -> None:
        # A replica may be stopped at any instruction, also where a `with` leaves its mode.
        BaseTorchFunctionMode().__enter__()
        BaseTorchDispatchMode().__enter__()
        if replica().local_id == failing:
            raise ValueError("no")
        replica().all_reduce("SUM", torch.ones(()))

    with pytest.raises(ValueError, match="no"):
        strategy.run(step)

    assert num_modes() == (0, 0)
    seen: list[tuple[int, int]] = []
    strategy.run(lambda: seen.append(num_modes()))
    assert seen == [(0, 0), (0, 0)]
    strategy.close()


def test_a_failed_step_leaves_the_modes_of_the_caller() -> None:
    strategy = uo.MirroredStrategy(["cpu:0", "cpu:1"])

    def step() -> None:
        if replica().local_id == 0:
            torch._C._pop_torch_function_stack()
            raise ValueError("no")

    with BaseTorchFunctionMode(), BaseTorchDispatchMode():
        with pytest.raises(ValueError, match="no"):
            strategy.run(step)
        assert num_modes() == (1, 1)
    strategy.close()
