"""Messages over our own connections: order, lengths, and connections that break."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from unisono.communicators.connection import Connection
from unisono.communicators.mesh import Mesh
from unisono.communicators.transport import BrokenConnectionError

SECONDS = 120.0
# More than the buffers of the kernel take while nobody reads.
LARGE = 8 << 20


@pytest.fixture
def pair() -> Iterator[tuple[Mesh, Mesh]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        calling = socket.create_connection(listener.getsockname())
        called, _ = listener.accept()
    both = Mesh(0, {1: Connection(calling, 1)}), Mesh(1, {0: Connection(called, 0)})
    yield both
    for mesh in both:
        mesh.close()


def filled(length: int, value: int) -> Tensor:
    return torch.full((length,), value, dtype=torch.uint8)


def swap(mesh: Mesh, given: Tensor, room: int) -> Tensor:
    output = filled(room, 0)
    other = 1 - mesh.rank
    assert mesh.progress([mesh.receive(other, output), mesh.send(other, given)], SECONDS)
    return output


@pytest.mark.parametrize("length", [1, 5, 1000, 40_000, LARGE])
def test_both_send_at_the_same_time(pair: tuple[Mesh, Mesh], length: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            given = [filled(length, 3), filled(length, 4)]
            found = list(pool.map(swap, pair, given, [length, length]))
            assert torch.equal(found[0], given[1])
            assert torch.equal(found[1], given[0])


def test_messages_arrive_in_order_however_many_are_under_way(pair: tuple[Mesh, Mesh]) -> None:
    first, second = pair
    given = [filled(length, number) for number, length in enumerate([7, 100_000, 1, 33_000])]
    rooms = [torch.empty_like(tensor) for tensor in given]
    sent = [first.send(1, tensor) for tensor in given]
    received = [second.receive(0, room) for room in rooms]

    with ThreadPoolExecutor(1) as pool:
        # The last one alone: what comes before it is moved on the way.
        last = pool.submit(second.progress, received[-1:], SECONDS)
        assert first.progress(sent[-1:], SECONDS)
        assert last.result()
    assert all(message.is_done for message in [*sent, *received])
    assert all(torch.equal(*both) for both in zip(rooms, given, strict=True))


def test_a_message_may_be_shorter_than_its_room(pair: tuple[Mesh, Mesh]) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(swap, pair, [filled(3, 1), filled(50_000, 2)], [60_000, 60_000]))

    assert found[1][:4].tolist() == [1, 1, 1, 0]
    assert int(found[0].sum()) == 100_000


def test_a_message_that_is_too_long_is_noticed(pair: tuple[Mesh, Mesh]) -> None:
    first, second = pair
    first.progress([first.send(1, filled(8, 1))], SECONDS)

    message = second.receive(0, filled(4, 0))
    with pytest.raises(BrokenConnectionError, match="it sent 8 bytes where 4 were") as caught:
        second.progress([message], SECONDS)
    assert caught.value.peer == 0


def test_a_wait_ends_after_its_time(pair: tuple[Mesh, Mesh]) -> None:
    first, second = pair
    room = filled(4, 0)
    message = second.receive(0, room)
    start = time.monotonic()

    assert not second.progress([message], 0.2)
    assert 0.2 <= time.monotonic() - start < SECONDS
    first.progress([first.send(1, filled(4, 9))], SECONDS)
    assert second.progress([message], SECONDS)
    assert room.tolist() == [9] * 4


def test_a_peer_that_closed_is_named(pair: tuple[Mesh, Mesh]) -> None:
    first, second = pair
    first.close()
    message = second.receive(0, filled(4, 0))

    with pytest.raises(BrokenConnectionError) as caught:
        second.progress([message], SECONDS)
    assert caught.value.peer == 0


def test_closing_ends_a_wait_of_another_thread(pair: tuple[Mesh, Mesh]) -> None:
    first, _ = pair
    message = first.receive(1, filled(4, 0))
    timer = threading.Timer(0.2, first.close)
    timer.start()
    start = time.monotonic()

    with pytest.raises(BrokenConnectionError):
        first.progress([message], SECONDS)
    assert time.monotonic() - start < SECONDS / 2
    timer.join()
