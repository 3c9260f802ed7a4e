"""Messages through Gloo: who is waited for, and connections that break."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.autograd.profiler import profile

from unisono.communicators.gloo import make_gloo_group, receive
from unisono.communicators.gloo_memory import packed
from unisono.communicators.gloo_peer import _SHORT
from unisono.communicators.gloo_transport import GlooTransport
from unisono.communicators.transport import BrokenConnectionError

SECONDS = 60.0
# It takes a while to move.
LARGE = 128 << 20

Three = tuple[GlooTransport, GlooTransport, GlooTransport]


@pytest.fixture
def three() -> Iterator[Three]:
    store = HashStore()

    def make(rank: int) -> GlooTransport:
        group = make_gloo_group(store, rank, 3, timeout_seconds=SECONDS)
        return GlooTransport(group, SECONDS)

    with ThreadPoolExecutor(3) as pool:
        first, second, third = pool.map(make, range(3))
    yield first, second, third
    for transport in (first, second, third):
        transport.close(has_failed=True)
    assert has_come_true(lambda: not threads())


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("unisono gloo")]


def has_come_true(is_true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SECONDS
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.001)
    return is_true()


def filled(length: int, value: int) -> Tensor:
    return torch.full((length,), value, dtype=torch.uint8)


def swap(transport: GlooTransport, peer: int, given: Tensor, room: int) -> Tensor:
    output = filled(room, 0)
    messages = [transport.receive(peer, output), transport.send(peer, given)]
    assert transport.progress(messages, SECONDS)
    return output


@pytest.mark.parametrize("length", [1, 1000, 65_536, 500_000, 1_000_000])
def test_both_send_at_the_same_time(three: Three, length: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        for _ in range(50 if length < 100_000 else 9):
            given = [filled(length, 3), filled(length, 4)]
            # Only a short message may be shorter than its room.
            more = 5 if length < 70_000 else 0
            found = list(pool.map(swap, three[:2], [1, 0], given, [length + more] * 2))
            assert found[0][length:].tolist() == [0] * more
            assert torch.equal(found[0][:length], given[1])
            assert torch.equal(found[1][:length], given[0])


def test_what_is_sent_may_change_once_it_is_done(three: Three) -> None:
    first, second, _ = three
    given, room = filled(4, 7), filled(4, 0)
    sent = first.send(1, given)
    assert first.progress([sent], SECONDS)
    given.fill_(9)

    assert second.progress([second.receive(0, room)], SECONDS)
    assert room.tolist() == [7] * 4


@pytest.mark.parametrize("missing", [1, 2])
def test_whoever_has_sent_is_not_waited_for(three: Three, missing: int) -> None:
    first = three[0]
    messages = [first.receive(peer, filled(4, 0)) for peer in (1, 2)]
    three[3 - missing].send(0, filled(4, 1))

    assert has_come_true(lambda: first.awaited() == [missing])
    assert not first.progress(messages, 0.0)
    three[missing].send(0, filled(4, 1))
    assert first.progress(messages, SECONDS)
    assert first.awaited() == []


def test_whoever_does_not_receive_is_waited_for(three: Three) -> None:
    first, second, _ = three
    message = first.send(1, filled(1_000_000, 1))

    assert not first.progress([message], 0.05)
    assert first.awaited() == [1]
    assert second.progress([second.receive(0, filled(1_000_000, 0))], SECONDS)
    assert first.progress([message], SECONDS)


def test_messages_that_were_cut_in_the_middle_end(three: Three) -> None:
    """Gloo itself never ends a wait for them."""
    first, second, _ = three
    room = filled(LARGE, 0)
    received = second.receive(0, room)
    assert not second.progress([received], 0.0)
    sent = first.send(1, filled(LARGE, 1))
    assert has_come_true(lambda: int(room[0]) == 1)
    second.close(has_failed=True)

    with pytest.raises(BrokenConnectionError) as caught:
        first.progress([sent], SECONDS)
    assert caught.value.peer == 1
    with pytest.raises(BrokenConnectionError):
        second.progress([received], SECONDS)
    first.close(has_failed=True)
    assert not threads()


def test_half_of_a_short_message_is_not_taken_for_the_whole(three: Three) -> None:
    first, second, _ = three
    room = filled(1000, 0)
    received = first.receive(1, room)
    assert not first.progress([received], 0.0)
    half = packed(filled(1000, 7))[:500]
    second._group.send([half], 0, _SHORT).wait()
    assert not first.progress([received], 0.05)
    second.close(has_failed=True)

    with pytest.raises(BrokenConnectionError) as caught:
        first.progress([received], SECONDS)
    assert caught.value.peer == 1
    assert not room.any()


def test_another_connection_that_breaks_is_noticed_during_a_wait(three: Three) -> None:
    first, _, third = three
    messages = [first.receive(peer, filled(4, 0)) for peer in (1, 2)]
    closed = threading.Timer(0.2, lambda: third.close(has_failed=True))
    closed.start()

    with pytest.raises(BrokenConnectionError) as caught:
        first.progress(messages, SECONDS)
    assert caught.value.peer == 2
    closed.join()


def test_whoever_closes_lets_others_have_what_was_sent(three: Three) -> None:
    first, second, _ = three
    given = [filled(4, number) for number in range(20)]
    for one in given:
        assert first.progress([first.send(1, one)], SECONDS)
    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(first.close, has_failed=False)
        for one in given:
            room = filled(4, 0)
            assert second.progress([second.receive(0, room)], SECONDS)
            assert torch.equal(room, one)
        closed.result(SECONDS)


def test_closing_ends_a_wait_of_another_thread(three: Three) -> None:
    first = three[0]
    message = first.receive(1, filled(4, 0))
    closed = threading.Timer(0.2, lambda: first.close(has_failed=False))
    closed.start()

    with pytest.raises(BrokenConnectionError):
        first.progress([message], SECONDS)
    closed.join()
    with pytest.raises(BrokenConnectionError, match="another thread has closed it"):
        first.send(1, filled(4, 0))


def test_a_transport_that_is_closed_leaves_nothing_of_gloo_behind(three: Three) -> None:
    first, second, _ = three
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(swap, (first, second), [1, 0], [filled(4, 1)] * 2, [4] * 2))
    group = weakref.ref(first._group)
    first.close(has_failed=False)

    assert group() is None


class Counted:
    """A group of Gloo that counts what is sent through it."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.num_sent = 0
        self.rank, self.size, self.recv = group.rank, group.size, group.recv

    def send(self, *args: Any) -> Any:
        self.num_sent += 1
        return self.group.send(*args)


@pytest.mark.parametrize(("length", "most"), [(64, 68), (65_536, 68), (500_000, 80)])
def test_messages_that_are_copied_are_seldom_answered(three: Three, length: int, most: int) -> None:
    counted = [Counted(transport._group) for transport in three[:2]]
    pair = [GlooTransport(group, SECONDS, [0, 1]) for group in counted]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(64):
            list(pool.map(swap, pair, [1, 0], [filled(length, 1)] * 2, [length] * 2))
        list(pool.map(lambda transport: transport.close(has_failed=False), pair))

    assert [group.num_sent for group in counted] == [most, most]


def test_more_is_received_at_once_than_there_is_room_for(three: Three) -> None:
    first, second, _ = three
    rooms = [filled(4, 0) for _ in range(20)]
    received = [second.receive(0, room) for room in rooms]
    for number in range(20):
        first.send(1, filled(4, number))

    assert second.progress(received, SECONDS)
    assert [room[0].item() for room in rooms] == list(range(20))


def test_nobody_sends_far_ahead_of_whoever_receives(three: Three) -> None:
    first, second, _ = three
    sent = [first.send(1, filled(4, number)) for number in range(200)]

    assert not all(message.is_done for message in sent)
    for number in range(200):
        room = filled(4, 0)
        assert second.progress([second.receive(0, room)], SECONDS)
        assert room.tolist() == [number] * 4
    assert first.progress(sent, SECONDS)


def test_others_send_through_the_same_group(three: Three) -> None:
    groups = [transport._group for transport in three]
    first, last = (GlooTransport(groups[rank], SECONDS, [0, 2]) for rank in (0, 2))
    theirs = groups[0].send([filled(4, 5)], 2, 0)
    ours, rooms = first.send(1, filled(4, 6)), [filled(4, 0), filled(4, 0)]
    assert last.progress([last.receive(0, rooms[0])], SECONDS)
    groups[2].recv([rooms[1]], 0, 0).wait()
    theirs.wait()

    assert first.progress([ours], SECONDS)
    assert [room[0].item() for room in rooms] == [6, 5]
    for transport in (first, last):
        transport.close(has_failed=False)
    # The group lives on.
    given = groups[0].send([filled(4, 7)], 2, 0)
    groups[2].recv([rooms[1]], 0, 0).wait()
    given.wait()
    assert rooms[1].tolist() == [7] * 4


def test_no_thread_waits(three: Three) -> None:
    first, second, _ = three
    message = first.receive(1, filled(1_000_000, 0))
    assert not first.progress([message], 0.05)
    assert not threads()
    second.send(0, filled(1_000_000, 1))
    assert first.progress([message], SECONDS)


def test_what_came_before_a_rank_closed_is_received(three: Three) -> None:
    first, second, _ = three
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(swap, (first, second), [1, 0], [filled(4, 1)] * 2, [4] * 2))
    # There is room for them before they are asked for.
    for value in (2, 3):
        assert first.progress([first.send(1, filled(4, value))], SECONDS)
    first.close(has_failed=False)

    for value in (2, 3):
        room = filled(4, 0)
        assert second.progress([second.receive(0, room)], SECONDS)
        assert room.tolist() == [value] * 4
    with pytest.raises(BrokenConnectionError):
        second.progress([second.receive(0, room)], SECONDS)


def test_messages_of_other_lengths_go_elsewhere(three: Three) -> None:
    first, second, _ = three
    other = first.send(1, filled(500_000, 5))
    sent = first.send(1, filled(400_000, 4))
    room = filled(400_000, 0)

    assert second.progress([second.receive(0, room)], SECONDS)
    assert torch.equal(room, filled(400_000, 4))
    assert first.progress([other, sent], SECONDS)


def test_the_profiler_does_not_see_messages() -> None:
    class Group:
        """A receive whose work outlives the profiler would crash the process."""

        def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Tensor:
            return tensors[0].cos()

    with profile() as profiled:
        receive(Group(), torch.zeros(1), 0, 0)
        torch.zeros(1).sin()

    seen = {event.name for event in profiled.function_events or []}
    assert "aten::sin" in seen
    assert "aten::cos" not in seen
