"""Random steps, failures and Ctrl-C for a given time. Nothing may be left behind.

    python tests/stress/random_steps.py --seconds 3600

Every step that succeeds is compared with the same step on one device. A step that fails or is
interrupted must end soon, with the error that was raised, and the next one must work. At the end,
threads, open files and child processes are those of the beginning, and the second half has taken no
more memory than the first. The program ends with an error, and the stacks of all threads, if an
action takes longer than two minutes.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import faulthandler
import gc
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo
from unisono.tracing import record

_DEADLINE_S = 120.0
_PRESS_AGAIN_S = 20.0
_NUM_FEATURES = 6
# The allocators of Python and of C cut their pages into pieces, so memory is never quite the same.
_MOST_GROWTH_MB = 16
_LIBRARIES = ctypes.CDLL(None)


class Planned(Exception):
    """A failure that the program has planned."""


class World:
    """A strategy, its model, and the same model on one device."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.num_replicas = draw.randint(1, 4)
        devices = [f"cpu:{i}" for i in range(self.num_replicas)]
        self.strategy = uo.MirroredStrategy(devices)
        with self.strategy.scope():
            self.model = nn.Sequential(
                nn.Linear(_NUM_FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 1)
            ).double()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.reference = nn.Sequential(*(copy.deepcopy(layer) for layer in self.model))
        self.plain = torch.optim.SGD(self.reference.parameters(), lr=0.01)
        self.captured = uo.function(_step(self.model, self.optimizer, lambda _: None))

    def batches(self) -> uo.PerReplica:
        """Returns a batch of random numbers for each replica."""
        seed = self.draw.randrange(2**31)
        make = torch.Generator().manual_seed(seed)
        size = self.draw.choice([2, 5])
        shape = (size, _NUM_FEATURES + 1)
        rows = [torch.randn(shape, generator=make).double() for _ in range(self.num_replicas)]
        return uo.PerReplica(rows)

    def synchronize(self) -> None:
        """After a step that may have been interrupted in the middle of an update."""
        self.reference.load_state_dict(self.model.state_dict())

    def check(self, rows: uo.PerReplica) -> None:
        """Makes the same step on one device, and compares the weights."""
        batch = torch.cat(list(rows.values))
        self.plain.zero_grad()
        _loss(self.reference, batch).backward()
        self.plain.step()
        for name, weight in self.model.state_dict().items():
            torch.testing.assert_close(weight, self.reference.state_dict()[name])
        self.check_classes()

    def check_classes(self) -> None:
        """Between runs, every object has its own class."""
        assert type(self.optimizer) is torch.optim.SGD, type(self.optimizer)
        assert all(type(layer) in (nn.Linear, nn.Tanh) for layer in self.model)


def _loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(rows[:, :-1]), rows[:, -1:])


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, before: Callable[[str], None]
) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(own: torch.Tensor) -> torch.Tensor:
        before("zero_grad")
        optimizer.zero_grad()
        before("forward")
        loss = _loss(model, own)
        before("backward")
        loss.backward()
        before("step")
        optimizer.step()
        before("return")
        return loss.detach()

    return step


def train(world: World, rows: uo.PerReplica, before: Callable[[str], None]) -> Any:
    """One training step; `before` is called on each replica before each part of it."""
    return world.strategy.run(_step(world.model, world.optimizer, before), (rows,))


def good_step(world: World) -> None:
    """A step that succeeds."""
    rows = world.batches()
    train(world, rows, lambda _: None)
    world.check(rows)


def captured_steps(world: World) -> None:
    """Steps that run eagerly, are captured, and are replayed, as often as they came before."""
    for _ in range(3):
        rows = world.batches()
        world.strategy.run(world.captured, (rows,))
        world.check(rows)


def failing_step(world: World) -> None:
    """A step in which one replica fails somewhere."""
    victim = world.draw.randrange(world.num_replicas)
    where = world.draw.choice(["zero_grad", "forward", "backward", "step", "return"])

    def fail(part: str) -> None:
        context = uo.get_replica_context()
        assert context is not None
        if part == where and context.replica_id_in_sync_group == victim:
            raise Planned(where)

    try:
        train(world, world.batches(), fail)
        raise AssertionError("The step has not failed.")
    except Planned:
        pass
    world.synchronize()
    world.check_classes()


def interrupted_step(world: World) -> None:
    """Steps until Ctrl-C is pressed, at a random moment.

    It is pressed again after a while, as a user would do: Python drops an interrupt that comes
    within a destructor or the callback of a weak reference.
    """
    delay, is_over = world.draw.random() * 0.05, threading.Event()
    is_captured = world.draw.random() < 0.3

    def press() -> None:
        wait = delay
        while not is_over.wait(wait):
            os.kill(os.getpid(), signal.SIGINT)
            wait = _PRESS_AGAIN_S

    presser = threading.Thread(target=press)
    try:
        presser.start()
        while True:
            if is_captured:
                world.strategy.run(world.captured, (world.batches(),))
            else:
                train(world, world.batches(), lambda _: None)
    except KeyboardInterrupt:
        pass
    finally:
        is_over.set()
        presser.join()
    world.synchronize()
    world.check_classes()


def meetings(world: World) -> None:
    """Replicas meet, reduce and gather, and act once for all."""
    calls: list[int] = []

    def step() -> tuple[Any, Any]:
        context = uo.get_replica_context()
        assert context is not None
        own = torch.tensor([float(context.replica_id_in_sync_group)])
        total = context.all_reduce("SUM", own)
        every = context.all_gather(own, 0)
        uo.once(lambda: calls.append(1))
        merged = context.merge_call(
            lambda strategy, value: strategy.reduce("SUM", value, None), (own,)
        )
        return total + merged, every

    totals, every = world.strategy.run(step)
    num_replicas = world.num_replicas
    assert calls == [1], calls
    for total in world.strategy.experimental_local_results(totals):
        assert total.item() == num_replicas * (num_replicas - 1), total
    for gathered in world.strategy.experimental_local_results(every):
        assert gathered.tolist() == list(range(num_replicas)), gathered


def own_objects(world: World) -> None:
    """Every replica makes parameters and an optimizer, and reads the shared state."""

    def step() -> tuple[float, int]:
        parameter = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        parameter.sum().backward()
        optimizer.step()
        return parameter.sum().item(), id(world.optimizer.state)

    sums, states = world.strategy.run(step)
    assert set(world.strategy.experimental_local_results(sums)) == {0.0}, sums
    assert len(set(world.strategy.experimental_local_results(states))) == 1
    world.check_classes()


def random_numbers(world: World) -> None:
    """Replicas draw different numbers, the same in every run with one seed."""

    def step() -> float:
        dropped = nn.functional.dropout(torch.ones(64), 0.5)
        return torch.rand(()).item() + dropped.sum().item()

    drawn = []
    for _ in range(2):
        torch.manual_seed(7)
        drawn.append(world.strategy.experimental_local_results(world.strategy.run(step)))
    assert drawn[0] == drawn[1], drawn
    assert len(set(drawn[0])) == world.num_replicas


def read_input(world: World) -> None:
    """Reads ahead, and leaves the input before its end."""
    size = 4 * world.num_replicas
    loader = DataLoader(TensorDataset(torch.arange(5 * size)), batch_size=size)
    dataset = world.strategy.experimental_distribute_dataset(loader)
    wanted = world.draw.randint(1, 5)
    for number, (batch,) in enumerate(dataset, start=1):
        sums = world.strategy.run(lambda own: own.sum(), (batch,))
        total = world.strategy.reduce("SUM", sums, None)
        assert int(total) == sum(range((number - 1) * size, number * size)), total
        if number == wanted:
            break


def traced(world: World) -> None:
    """Records a trace of a good step and a failing one."""
    with tempfile.TemporaryDirectory() as folder, record(folder) as trace:
        good_step(world)
        failing_step(world)
    assert trace is not None


def two_at_once(world: World) -> None:
    """Another strategy runs at the same time, on another thread."""
    other = World(random.Random(world.draw.randrange(2**31)))
    errors: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(5):
                good_step(other)
                captured_steps(other)
                failing_step(other)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(5):
        good_step(world)
        captured_steps(world)
    thread.join()
    other.strategy.close()
    if errors:
        raise errors[0]


ACTIONS: dict[Callable[[World], None], int] = {
    good_step: 8,
    captured_steps: 4,
    failing_step: 4,
    interrupted_step: 3,
    meetings: 4,
    own_objects: 2,
    random_numbers: 2,
    read_input: 1,
    traced: 1,
    two_at_once: 1,
}


def _left_behind() -> dict[str, Any]:
    gc.collect()
    names = sorted(one.name for one in threading.enumerate() if "unisono" in one.name)
    children = f"/proc/self/task/{os.getpid()}/children"
    with open(children) as file:
        return {
            "threads": names,
            "files": len(os.listdir("/proc/self/fd")),
            "children": file.read().split(),
        }


def _memory_mb() -> float:
    """Returns the memory of this process without what nobody uses any longer."""
    gc.collect()
    with suppress(AttributeError):
        _LIBRARIES.malloc_trim(0)
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1024


def _is_same(before: dict[str, Any]) -> bool:
    deadline = time.monotonic() + 30
    # A thread that was asked to end may not have ended yet.
    while (now := _left_behind()) != before and time.monotonic() < deadline:
        time.sleep(0.1)
    if now != before:
        print(f"Left behind: {now}, at the beginning there was {before}.", file=sys.stderr)
    return now == before


def main() -> int:
    """Runs until the time is over."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    torch.set_num_threads(1)
    # A shell lets what it starts in the background ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    actions, weights = zip(*ACTIONS.items(), strict=True)
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    warm_up(draw)
    before = _left_behind()
    start, counts, memory = time.monotonic(), Counter[str](), [_memory_mb()]
    while time.monotonic() - start < options.seconds:
        world = World(draw)
        for action in draw.choices(actions, weights, k=25):
            faulthandler.dump_traceback_later(_DEADLINE_S, exit=True)
            action(world)
            counts[action.__name__] += 1
        world.strategy.close()
        del world
        memory.append(_memory_mb())
    faulthandler.dump_traceback_later(_DEADLINE_S, exit=True)
    is_clean = _is_same(before)
    faulthandler.cancel_dump_traceback_later()
    assert getattr(sys, "_is_gil_enabled", lambda: True)() == has_lock
    half = len(memory) // 2
    growth = max(memory[half:]) - max(memory[: half + 1])
    print(
        f"{'with' if has_lock else 'without'} the interpreter lock, seed {options.seed}, "
        f"{time.monotonic() - start:.0f} s, {len(memory) - 1} strategies: {dict(counts)}; memory "
        f"{memory[0]:.0f} MB at the beginning, {memory[half]:.0f} MB after half of them, "
        f"{memory[-1]:.0f} MB at the end"
    )
    return 0 if is_clean and growth <= _MOST_GROWTH_MB else 1


def warm_up(draw: random.Random) -> None:
    """Does everything once: torch keeps some memory and threads forever."""
    world = World(draw)
    for action in ACTIONS:
        faulthandler.dump_traceback_later(_DEADLINE_S, exit=True)
        action(world)
    world.strategy.close()


if __name__ == "__main__":
    sys.exit(main())
