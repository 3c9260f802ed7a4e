"""The store of a job: what it does, who may ask it, and how long a question waits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
from keyboard import press_ctrl_c_in
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistNetworkError, DistStoreError

from unisono.communicators import coordinator_store, translated_store_errors
from unisono.communicators.gloo import make_gloo_group
from unisono.communicators.greeting import call
from unisono.communicators.job_store import JobStore, serve_store, store_at
from unisono.communicators.sockets import listening
from unisono.errors import WorkerLostError, WorkerTimeoutError

KEY = b"k" * 32
SECONDS = 30.0


@pytest.fixture
def served() -> Iterator[JobStore]:
    store = serve_store("127.0.0.1", listening("127.0.0.1", 0), KEY, None)
    yield store
    store.close()


def connected(address: tuple[str, int], rank: int = 1) -> JobStore:
    return store_at(address, call(address, KEY, rank, None, time.monotonic() + SECONDS))


def test_all_ends_see_one_table(served: JobStore) -> None:
    other = connected((served.host, served.port))
    prefixed = PrefixStore("a", PrefixStore("b", other))

    other.set("b/a/bytes", bytes(range(256)))
    prefixed.set("text", "é")
    assert served.get("b/a/bytes") == bytes(range(256))
    assert prefixed.multi_get(["text", "bytes"]) == ["é".encode(), bytes(range(256))]
    assert [served.add("count", 2), other.add("count", -5), served.add("count", 0)] == [2, -3, -3]
    assert prefixed.check(["text"])
    assert not prefixed.check(["text", "nothing"])
    assert prefixed.delete_key("text")
    assert not prefixed.delete_key("text")
    assert coordinator_store(prefixed) is other


def test_a_key_is_waited_for(served: JobStore) -> None:
    other = connected((served.host, served.port))
    timer = threading.Timer(0.1, served.set, ["late", "here"])
    timer.start()
    assert other.get("late") == b"here"
    with pytest.raises(DistStoreError, match="Nobody has written never"):
        other.wait(["never"], timedelta(seconds=0.1))
    timer.join()


def test_gloo_can_use_it(served: JobStore) -> None:
    stores = [served, connected((served.host, served.port))]

    def work(rank: int) -> list[float]:
        group = make_gloo_group(PrefixStore("own", stores[rank]), rank, 2, timeout_seconds=SECONDS)
        total = torch.ones(2)
        group.allreduce([total]).wait()
        return total.tolist()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [[2.0, 2.0]] * 2


def test_the_end_of_the_server_is_told(served: JobStore) -> None:
    other = connected((served.host, served.port))
    served.close()
    with pytest.raises(DistNetworkError, match="The connection to rank 0 broke"):
        other.add("count", 0)


@contextmanager
def relay(address: tuple[str, int], change: bytes | None) -> Iterator[tuple[str, int]]:
    """Somebody between a caller and a store, who changes or keeps back what the store answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def there(source: socket.socket, sink: socket.socket) -> None:
            with suppress(OSError):
                while data := source.recv(4096):
                    sink.sendall(data)

        def back(source: socket.socket, sink: socket.socket) -> None:
            with suppress(OSError):
                while data := source.recv(4096):
                    if b"secret" not in data:
                        sink.sendall(data)
                    elif change is not None:
                        sink.sendall(data.replace(b"secret", change))

        def end(one: socket.socket) -> None:
            # To close it would not wake who reads from it.
            with one, suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

        with ThreadPoolExecutor(3) as pool, ExitStack() as ends:

            def run() -> None:
                guest, _ = listener.accept()
                store = socket.create_connection(address)
                ends.callback(end, guest)
                ends.callback(end, store)
                pool.submit(there, guest, store)
                pool.submit(back, store, guest)

            listener.settimeout(SECONDS)
            pool.submit(run)
            yield listener.getsockname()


def test_who_changes_an_answer_is_found_out(served: JobStore) -> None:
    served.set("key", "secret")
    with relay((served.host, served.port), b"forged") as address:
        other = connected(address)
        assert other.check(["another"]) is False
        with pytest.raises(DistNetworkError, match="somebody has changed what it sent"):
            other.get("key")


def test_an_answer_that_does_not_come_ends_at_the_deadline(served: JobStore) -> None:
    served.set("key", "secret")
    with relay((served.host, served.port), None) as address:
        other = connected(address)
        other.answer_by = time.monotonic()
        with pytest.raises(DistStoreError, match="Rank 0 has not answered for"):
            other.get("key")
        # An answer that comes later must not be taken for another one.
        with pytest.raises(DistNetworkError):
            other.check(["another"])


@pytest.mark.parametrize(
    ("error", "kind"), [(DistStoreError, WorkerTimeoutError), (DistNetworkError, WorkerLostError)]
)
def test_a_silent_coordinator_is_late_and_one_that_hung_up_is_lost(
    error: type[Exception], kind: type[Exception]
) -> None:
    with pytest.raises(kind, match="The coordinator, which usually"), translated_store_errors():
        raise error("reason")


def test_a_question_hears_ctrl_c(served: JobStore) -> None:
    served.set("key", "secret")
    with relay((served.host, served.port), None) as address:
        other = connected(address)
        press_ctrl_c_in(lambda: other.get("key"))


def test_nonsense_ends_a_connection_and_not_the_server(served: JobStore) -> None:
    address = served.host, served.port
    questions: list[Any] = [["add", "key", "one"], ["get"], 7, {}, ["set", "key"]]
    for question in questions:
        other = connected(address)
        with pytest.raises(DistNetworkError):
            other._put(question, time.monotonic() + SECONDS)
    assert connected(address).add("count", 1) == 1
