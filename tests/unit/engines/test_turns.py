import threading
from collections.abc import Callable, Sequence

import pytest

import unisono as uo
from unisono.engines import OneByOne, Pace, Turns

Make = Callable[..., uo.MirroredStrategy]


def replica_id() -> int:
    context = uo.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


def attend(turns: Turns, bodies: Sequence[Callable[[], object]]) -> None:
    """Lets each body run on a thread of its own, in its turns."""

    def work(replica: int) -> None:
        turns.begin(replica)
        bodies[replica]()
        turns.leave(replica)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(bodies))]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 5])
def test_who_waits_lets_the_next_run_until_it_is_over(num_replicas: int) -> None:
    turns = OneByOne(num_replicas)
    trace: list[str] = []

    def body(replica: int) -> None:
        trace.append(f"a{replica}")
        turns.wait_for(replica, lambda: len(trace) >= num_replicas)
        trace.append(f"b{replica}")

    attend(turns, [lambda i=i: body(i) for i in range(num_replicas)])  # type: ignore[misc]

    # The last one to come finds it over already, and keeps its turn.
    *others, last = range(num_replicas)
    assert trace == [f"a{i}" for i in [*others, last]] + [f"b{i}" for i in [last, *others]]


def test_after_a_long_turn_everybody_may_run() -> None:
    turns = OneByOne(2, patience_s=0.01)
    met = threading.Event()

    attend(turns, [lambda: met.wait(20), met.set])

    assert met.is_set()
    assert turns.is_free


def test_a_turn_without_end_is_waited_for_where_no_patience_is_set() -> None:
    turns = OneByOne(2)
    order: list[int] = []
    pause = threading.Event()

    attend(turns, [lambda: order.append(int(pause.wait(0.3))), lambda: order.append(1)])

    assert order == [0, 1]
    assert not turns.is_free


def test_short_turns_go_on_and_long_ones_make_runs_concurrent() -> None:
    pace = Pace()
    short = pace.turns(2)
    pace.learn(short)
    long = pace.turns(2)
    assert isinstance(long, OneByOne)
    long.free()
    pace.learn(long)

    kinds = [type(pace.turns(2)) for _ in range(9)]

    assert isinstance(short, OneByOne)
    assert kinds == [Turns] * 8 + [OneByOne]


def test_replicas_that_wait_for_each_other_outside_of_us_do_not_hang(mirrored: Make) -> None:
    strategy = mirrored()
    events = [threading.Event(), threading.Event()]

    def step() -> bool:
        events[replica_id()].set()
        return events[1 - replica_id()].wait(timeout=20)

    assert [strategy.run(step) for _ in range(20)] == [True] * 20
