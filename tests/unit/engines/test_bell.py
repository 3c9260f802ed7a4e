import threading
import time
from typing import Any

import pytest

from unisono.engines.turns import Bell, PythonBell, make_bell


@pytest.fixture(params=["python", "for many threads", "for one thread"])
def bells(request: pytest.FixtureRequest) -> tuple[Bell, Bell]:
    if request.param == "python":
        return PythonBell(), PythonBell()
    num_threads = 1 if request.param == "for one thread" else 10_000
    return make_bell(num_threads), make_bell(num_threads)


def test_a_bell_counts_how_often_it_rang(bells: tuple[Bell, Bell]) -> None:
    bell, _ = bells

    for _ in range(3):
        bell.ring()

    assert bell.count == 3
    assert bell.wait(2, 0.0) is True


def test_a_bell_that_does_not_ring_is_waited_for_no_longer_than_said(
    bells: tuple[Bell, Bell],
) -> None:
    start = time.monotonic()

    assert bells[0].wait(0, 0.02) is False
    assert time.monotonic() - start >= 0.02


def test_two_threads_that_ring_for_each_other_never_miss_it(bells: tuple[Bell, Bell]) -> None:
    there, back = bells
    rounds = 300

    def answer() -> None:
        for i in range(rounds):
            assert there.wait(i, 30)
            back.ring()

    other = threading.Thread(target=answer)
    other.start()
    for i in range(rounds):
        there.ring()
        assert back.wait(i, 30)
    other.join(30)

    assert not other.is_alive()


def test_two_threads_that_ring_and_wait_never_miss_it(bells: tuple[Any, Any]) -> None:
    there, back = bells
    rounds = 300

    def answer() -> None:
        assert there.wait(0, 30)
        for i in range(1, rounds):
            assert back.ring_and_wait(there, i, 30)
        back.ring()

    other = threading.Thread(target=answer)
    other.start()
    for i in range(rounds):
        assert there.ring_and_wait(back, i, 30)
    other.join(30)

    assert not other.is_alive()
    assert there.count == back.count == rounds
