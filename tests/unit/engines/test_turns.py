import threading
from collections.abc import Callable, Sequence

import pytest

from unisono.engines import OneByOne, Turns


def attend(turns: Turns, bodies: Sequence[Callable[[], object]]) -> None:
    """Lets each body run on its own thread, in its turns."""

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


def test_a_long_turn_is_waited_for() -> None:
    turns = OneByOne(2)
    order: list[int] = []
    pause = threading.Event()

    attend(turns, [lambda: order.append(int(pause.wait(0.3))), lambda: order.append(1)])

    assert order == [0, 1]
