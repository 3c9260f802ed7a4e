"""Where the store of a job listens, whom it lets in, and how long a worker looks for it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from keyboard import press_ctrl_c_in
from processes.ports import free_ports
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from unisono.cluster import Membership, SimpleClusterResolver, open_store
from unisono.communicators import JobStore
from unisono.errors import CommunicationError, JobMismatchError, WorkerTimeoutError

SECONDS = 30.0


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNISONO_JOB_TOKEN", raising=False)
    monkeypatch.delenv("UNISONO_LISTEN", raising=False)


def workers(host: str = "127.0.0.1", size: int = 2) -> list[Membership]:
    (port,) = free_ports(1)
    cluster = {"worker": [f"{host}:{port}", *["127.0.0.1:9"] * (size - 1)]}
    return [
        Membership.of(SimpleClusterResolver(cluster, task_type="worker", task_id=rank))
        for rank in range(size)
    ]


@contextmanager
def served(membership: Membership) -> Iterator[JobStore]:
    store = open_store(membership, SECONDS)
    try:
        yield store
    finally:
        store.close()


@pytest.mark.parametrize("token", ["", "secret", "é" * 100])
def test_workers_with_the_same_token_meet(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_JOB_TOKEN", token)
    first, second = workers()
    with served(first) as store:
        open_store(second, SECONDS).set("key", "value")
        assert store.get("key") == b"value"


@pytest.mark.parametrize("theirs", ["", "another"])
def test_a_stranger_needs_the_token(theirs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = workers()
    monkeypatch.setenv("UNISONO_JOB_TOKEN", "secret")
    with served(first) as store:
        monkeypatch.setenv("UNISONO_JOB_TOKEN", theirs)
        with pytest.raises(JobMismatchError, match=r"was refused.*another UNISONO_JOB_TOKEN"):
            open_store(second, SECONDS)
        assert store.get("refused/1") == b"a process at 127.0.0.1"


def test_another_job_is_refused_without_a_token_too() -> None:
    first, second = workers()
    with served(first), pytest.raises(JobMismatchError, match="another job"):
        open_store(replace(second, job="another"), SECONDS)


@pytest.mark.parametrize(("token", "warns"), [("", True), ("secret", False)])
def test_a_job_without_a_token_says_what_that_means(
    token: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UNISONO_JOB_TOKEN", token)
    with caplog.at_level(logging.INFO), served(workers()[0]):
        assert ("everybody who reaches 127.0.0.1" in caplog.text) is warns
        assert ("UNISONO_JOB_TOKEN" in caplog.text) is warns


def test_the_store_listens_at_the_address_of_rank_0_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = workers()
    with served(first), pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", first.coordinator.port), timeout=SECONDS)
    monkeypatch.setenv("UNISONO_LISTEN", "0.0.0.0")
    with served(first):
        socket.create_connection(("127.0.0.2", first.coordinator.port), timeout=SECONDS).close()
        open_store(second, SECONDS)


def test_an_address_of_another_host_is_listened_for_everywhere() -> None:
    # As where a service or a container's host has the address, and hands connections on.
    first, _ = workers("192.0.2.1")
    with served(first):
        socket.create_connection(("127.0.0.1", first.coordinator.port), timeout=SECONDS).close()


@pytest.mark.parametrize("told", ["192.0.2.1", "no.such.host.invalid"])
def test_a_wrong_address_to_listen_at_is_told(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_LISTEN", told)
    with pytest.raises(CommunicationError, match=f"cannot listen at UNISONO_LISTEN='{told}'"):
        open_store(workers()[0], SECONDS)


def connect_to_silence(membership: Membership, seconds: float) -> None:
    address = membership.coordinator.host, membership.coordinator.port
    try:
        with socket.create_server(address):
            open_store(membership, seconds)
    finally:
        # A call to torch's store ends after its own time.
        for thread in threading.enumerate():
            if thread.name == "unisono call":
                thread.join(SECONDS)


def of_a_launcher(membership: Membership) -> Membership:
    return replace(membership, uses_existing_store=True)


@pytest.mark.parametrize("change", [lambda one: one, of_a_launcher], ids=["rank 0", "launcher"])
def test_something_that_never_answers_is_given_up_in_time(
    change: Callable[[Membership], Membership],
) -> None:
    with pytest.raises(WorkerTimeoutError, match=r"tried for 0.5 s to reach rank 0") as raised:
        connect_to_silence(change(workers()[1]), 0.5)
    assert raised.value.ranks == (0,)


@pytest.mark.parametrize("change", [lambda one: one, of_a_launcher], ids=["rank 0", "launcher"])
def test_a_worker_that_waits_hears_ctrl_c(change: Callable[[Membership], Membership]) -> None:
    press_ctrl_c_in(lambda: connect_to_silence(change(workers()[1]), 4.0))


def test_the_port_of_torchs_default_group_is_shared() -> None:
    first, second = workers()
    store = TCPStore("127.0.0.1", first.coordinator.port, is_master=True, wait_for_workers=False)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with served(first) as own:
            assert own.port != first.coordinator.port
            assert open_store(second, SECONDS).port == own.port
    finally:
        distributed.destroy_process_group()


def test_where_a_launcher_keeps_a_store_rank_0_says_there_where_its_own_is() -> None:
    first, second = map(of_a_launcher, workers())
    launcher = TCPStore("127.0.0.1", first.coordinator.port, is_master=True, wait_for_workers=False)
    with served(first) as store:
        other = open_store(second, SECONDS)
        assert other.port == store.port != launcher.port
        other.set("key", "value")
        assert store.get("key") == b"value"
