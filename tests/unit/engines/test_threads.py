import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_replica import replica_id
from torch import Tensor, nn

import unisono as uo

Make = Callable[..., uo.MirroredStrategy]


def replica_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("unisono-replica")]


def test_replicas_run_at_the_same_time(mirrored: Make) -> None:
    strategy = mirrored()
    events = [threading.Event(), threading.Event()]

    def step() -> bool:
        events[replica_id()].set()
        return events[1 - replica_id()].wait(timeout=60)

    assert strategy.run(step) is True


def test_the_same_threads_are_used_again_and_the_first_is_the_callers(mirrored: Make) -> None:
    strategy = mirrored(3)

    runs = [strategy.run(threading.get_ident).values for _ in range(5)]

    assert len(set(runs[0])) == 3
    assert runs[0][0] == threading.get_ident()
    assert set(runs) == {runs[0]}


def test_one_replica_runs_on_the_thread_of_the_caller(mirrored: Make) -> None:
    assert mirrored(1).run(threading.get_ident) == threading.get_ident()
    assert replica_threads() == []


def test_there_are_no_threads_before_the_first_run(mirrored: Make) -> None:
    mirrored(3)

    assert replica_threads() == []


def test_threads_end_with_close_and_start_again(mirrored: Make) -> None:
    strategy = mirrored()

    for _ in range(3):
        strategy.run(replica_id)
        assert [thread.name for thread in replica_threads()] == ["unisono-replica-1"]
        strategy.close()
        strategy.close()
        assert replica_threads() == []


def test_threads_end_with_experimental_finalize(mirrored: Make) -> None:
    strategy = mirrored()
    strategy.run(replica_id)

    assert strategy.experimental_finalize() == []
    assert replica_threads() == []


def test_threads_end_when_the_strategy_is_collected() -> None:
    strategy = uo.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()

    strategy.run(step)
    watched = weakref.ref(strategy)
    del strategy, step
    gc.collect()

    wait_until(lambda: replica_threads() == [])
    assert watched() is None
    # The model outlives the strategy, and is a model still.
    assert model(torch.ones(3, 2)).shape == (3, 2)


def test_replicas_share_the_intra_op_threads_of_the_caller(mirrored: Make) -> None:
    before = torch.get_num_threads()

    num_threads = mirrored().run(torch.get_num_threads)

    assert num_threads == max(1, before // 2)
    assert torch.get_num_threads() == before


def test_two_strategies_do_not_disturb_each_other(mirrored: Make) -> None:
    first, second = mirrored(2), mirrored(3)

    for _ in range(3):
        assert first.run(replica_id).values == (0, 1)
        assert second.run(replica_id).values == (0, 1, 2)


def test_run_can_be_called_from_any_thread(mirrored: Make) -> None:
    strategy = mirrored()
    results: list[Any] = []

    def run_often() -> None:
        for _ in range(20):
            results.append(strategy.run(replica_id).values)

    callers = [threading.Thread(target=run_often) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()

    assert results == [(0, 1)] * 60


def test_two_threads_can_train_one_model(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    nn.init.zeros_(model.weight)
    # The mean over all samples is 2 in both, but replicas do not count the same.
    uneven = uo.PerReplica([torch.ones(3, 1), torch.full((1, 1), 5.0)])
    even = uo.PerReplica([torch.ones(1, 1), torch.full((1, 1), 3.0)])

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()

    def train(parts: uo.PerReplica) -> None:
        for _ in range(50):
            strategy.run(step, args=(parts,))

    trainers = [threading.Thread(target=train, args=(parts,)) for parts in (uneven, even)]
    for trainer in trainers:
        trainer.start()
    for trainer in trainers:
        trainer.join()

    assert model.weight.item() == -200


def test_serial_replicas_run_one_at_a_time_in_order(mirrored: Make) -> None:
    strategy = mirrored(3, serial=True)
    trace: list[str] = []

    def merge(_: uo.Strategy) -> None:
        trace.append("merge")

    def step() -> None:
        context = uo.get_replica_context()
        assert context is not None
        for part in "abc":
            trace.append(f"{part}{replica_id()}")
            time.sleep(0.002)
            trace.append(f"{part}{replica_id()}")
            if part != "c":
                context.merge_call(merge)

    strategy.run(step)

    expected = "a0 a0 a1 a1 a2 a2 merge b0 b0 b1 b1 b2 b2 merge c0 c0 c1 c1 c2 c2"
    assert trace == expected.split()


def test_the_environment_can_make_replicas_serial(
    mirrored: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNISONO_SERIAL", "1")
    strategy = mirrored(3)
    trace: list[int] = []

    def step() -> None:
        trace.append(replica_id())
        time.sleep(0.005)
        trace.append(replica_id())

    strategy.run(step)
    strategy.run(step)

    assert trace == [0, 0, 1, 1, 2, 2] * 2


def test_a_serial_replica_that_fails_stops_those_after_it(mirrored: Make) -> None:
    strategy = mirrored(3, serial=True)

    for _ in range(20):
        trace: list[int] = []

        def step(trace: list[int] = trace) -> None:
            trace.append(replica_id())
            if replica_id() == 1:
                raise LookupError

        with pytest.raises(LookupError):
            strategy.run(step)
        assert trace == [0, 1]


def test_serial_gives_the_bits_of_concurrent_replicas(mirrored: Make) -> None:
    def train(strategy: uo.Strategy) -> torch.Tensor:
        torch.manual_seed(3)
        with strategy.scope():
            model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Tanh())
            optimizer = torch.optim.Adam(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().sum().backward()
            optimizer.step()

        for _ in range(5):
            strategy.run(step)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(train(mirrored(3)), train(mirrored(3, serial=True)))


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def switch_often() -> Any:
    """Threads take turns so often that what depends on luck does not last."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)
