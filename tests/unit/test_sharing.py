"""What threads share, with and without the interpreter lock. Replicas are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import unisono as uo
from unisono.engines.threads import _Board
from unisono.engines.turns import OneByOne
from unisono.modules import owners
from unisono.modules.front import in_front
from unisono.modules.once_calls import OnceOptimizer
from unisono.sharing import LiveSet, computed_once
from unisono.tracing.recorder import Recorder

NUM_THREADS = 4


def at_the_same_time(call: Callable[[int], Any], num_threads: int = NUM_THREADS) -> list[Any]:
    """Calls `call(0)`, `call(1)`, ... on threads that begin together."""
    start = threading.Barrier(num_threads)

    def run(number: int) -> Any:
        start.wait(250)
        return call(number)

    with ThreadPoolExecutor(num_threads) as pool:
        return [one.result(250) for one in [pool.submit(run, i) for i in range(num_threads)]]


class Thing:
    pass


def test_a_live_set_may_be_added_to_while_it_is_iterated() -> None:
    things = [Thing() for _ in range(3)]
    live: LiveSet[Thing] = LiveSet()
    for thing in things:
        live.add(thing)
        live.add(thing)

    more = []
    for _ in live:
        more.append(Thing())
        live.add(more[-1])

    assert list(live) == [*things, *more]
    del things[0], thing
    assert list(live) == [*things, *more]


def test_a_live_set_loses_nothing_that_threads_add_at_the_same_time() -> None:
    live: LiveSet[Thing] = LiveSet()
    things = [[Thing() for _ in range(50)] for _ in range(NUM_THREADS)]

    def add(number: int) -> None:
        for thing in things[number]:
            live.add(thing)
            assert thing in list(live)

    at_the_same_time(add)

    assert set(live) == {thing for own in things for thing in own}


def test_a_live_set_loses_nothing_while_a_thread_discards() -> None:
    live: LiveSet[Thing] = LiveSet()
    kept = [Thing() for _ in range(200)]

    def use(number: int) -> None:
        for thing in kept:
            live.add(thing if number == 0 else (other := Thing()))
            if number:
                live.discard(other)
                assert other not in list(live)

    at_the_same_time(use)

    assert list(live) == kept


def test_what_is_computed_once_is_computed_once_for_all_threads() -> None:
    calls = []

    @computed_once
    def slow(argument: int) -> object:
        calls.append(argument)
        # Long enough for the others to come.
        time.sleep(0.05)
        return object()

    results = at_the_same_time(lambda _: slow(1))

    assert calls == [1]
    assert len(set(results)) == 1
    assert slow(2) is not slow(1)


def test_what_failed_is_computed_again() -> None:
    divisors = [0, 1]

    @computed_once
    def compute() -> float:
        return 1 / divisors.pop(0)

    with pytest.raises(ZeroDivisionError):
        compute()
    assert compute() == compute() == 1.0


def test_threads_get_one_class_that_comes_before_another() -> None:
    for _ in range(10):
        cls = type("Own", (torch.optim.SGD,), {})
        made = at_the_same_time(lambda _, cls=cls: in_front(OnceOptimizer, cls))  # type: ignore[misc]
        assert len(set(made)) == 1


def test_a_call_is_taken_by_its_thread_or_taken_back_but_not_both() -> None:
    for _ in range(30):
        board, outcomes = _Board(2), dict[int, Any]()
        board.given[1] = (lambda: None, outcomes)

        def take(number: int, board: _Board = board) -> bool:
            if number:
                return board.take(1) is not None
            is_mine = board.given.pop(1, None) is not None
            # The thread waits for its next call. None is the last.
            board.end(2)
            return is_mine

        assert sorted(at_the_same_time(take, 2)) == [False, True]


def test_replicas_take_turns_until_the_last_has_left() -> None:
    for _ in range(10):
        turns = OneByOne(NUM_THREADS)
        running: list[int] = []

        def replica(number: int, turns: OneByOne = turns, running: list[int] = running) -> None:
            turns.begin(number)
            for _ in range(3):
                running.append(number)
                assert running == [number]
                running.remove(number)
                looks = iter([False, True])
                turns.wait_for(number, lambda looks=looks: next(looks))  # type: ignore[misc]
            turns.leave(number)

        at_the_same_time(replica)


def test_a_trace_is_read_while_threads_add_to_it() -> None:
    recorder = Recorder(time.perf_counter_ns, 1 << 20)
    has_ended = threading.Event()

    def use(number: int) -> None:
        if number:
            for i in range(5000):
                recorder.add(i, "compute", "work", {"number": i})
            has_ended.set()
            return
        for _ in range(100):
            if has_ended.is_set():
                return
            for lane in list(recorder.lanes):
                numbers = [arguments["number"] for *_, arguments in lane.events()]
                assert numbers == list(range(len(numbers)))

    at_the_same_time(use, 2)


@contextmanager
def model_in(num_replicas: int) -> Iterator[tuple[uo.MirroredStrategy, nn.Linear]]:
    strategy = uo.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    with strategy.scope():
        model = nn.Linear(2, 1)
    try:
        yield strategy, model
    finally:
        strategy.close()


def test_optimizers_that_replicas_make_at_the_same_time_get_their_class_back() -> None:
    with model_in(NUM_THREADS) as (strategy, model):
        made: list[Any] = []

        def step() -> None:
            for _ in range(10):
                made.append(torch.optim.SGD(list(model.parameters()), lr=0.1))

        for _ in range(3):
            strategy.run(step)

        assert len(made) == 3 * 10 * NUM_THREADS
        assert {type(one) for one in made} == {torch.optim.SGD}


def test_replicas_that_look_at_an_optimizer_first_find_one_state() -> None:
    with model_in(NUM_THREADS) as (strategy, model):
        for _ in range(20):
            with strategy.scope():
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            found = strategy.run(lambda optimizer=optimizer: id(optimizer.state))
            assert len(set(strategy.experimental_local_results(found))) == 1


def test_a_module_keeps_its_strategy_when_an_earlier_entry_ends() -> None:
    with model_in(2) as (strategy, model):
        mirrors = strategy.extended.mirrors
        # The garbage collector holds entries that end until all know of it.
        held = owners._owners[id(model)]
        owners.give_to(model, mirrors)
        assert held is not owners._owners[id(model)]
        del held

        assert owners.owner_of(model) is mirrors


def test_a_module_may_be_freed_while_another_is_looked_for() -> None:
    class Frees(list[nn.Module]):
        def __iter__(self) -> Iterator[nn.Module]:
            others.clear()
            return super().__iter__()

    with model_in(2) as (strategy, model):
        with strategy.scope():
            others = [nn.Linear(2, 1) for _ in range(3)]
        strategy.run(lambda: None)
        mirror = strategy.extended.mirrors.mirrors[id(model)]
        mirror.replicas = Frees(mirror.replicas)
        unknown = nn.Linear(2, 1)

        assert strategy.extended.mirrors.of_program(unknown) is unknown
        assert not others


def test_strategies_are_made_and_run_by_several_threads() -> None:
    def train(number: int) -> float:
        for _ in range(5):
            with model_in(2) as (strategy, model):
                with strategy.scope():
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

                def step(model: nn.Linear = model, optimizer: Any = optimizer) -> None:
                    optimizer.zero_grad()
                    model(torch.ones(4, 2)).sum().backward()
                    optimizer.step()

                before = model.bias.item()
                strategy.run(step)
                assert model.bias.item() == pytest.approx(before - 0.1 * 4)
        return number

    assert at_the_same_time(train) == list(range(NUM_THREADS))
