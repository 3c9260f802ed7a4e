"""How ranks come to be connected: strangers, secrets, encryption, and who is missing."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from processes.certificates import keys, new_authority
from processes.harness import Outcome, run_ranks
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from unisono.communicators import joining
from unisono.communicators.greeting import call
from unisono.communicators.hosts import address_of_interface
from unisono.communicators.job_store import serve_store, store_at
from unisono.communicators.joining import join_mesh
from unisono.communicators.mesh import Mesh
from unisono.communicators.network import NetworkCommunicator
from unisono.communicators.sockets import encryption, listening
from unisono.errors import CommunicationError, UnsupportedError, WorkerTimeoutError
from unisono.options import ReduceOp

TLS = "GLOO_DEVICE_TRANSPORT_TCP_TLS"


def join(store: Store, rank: int, size: int, seconds: float = 20.0) -> Mesh:
    return join_mesh(store, rank, size, timeout_seconds=seconds, joining_seconds=seconds)


def joined(pool: ThreadPoolExecutor, store: Store, size: int) -> list[Future[Mesh]]:
    return [pool.submit(join, store, rank, size) for rank in range(size)]


def test_a_rank_that_said_where_it_is_and_never_calls_is_named() -> None:
    store = HashStore()
    # Rank 1 says all that it should, and does no more.
    for part in ("address", "mesh"):
        said = PrefixStore(part, store)
        said.add("came/1", 1)
        said.set("says/1", '2/["127.0.0.1", 1, "", false]' if part == "mesh" else "2/127.0.0.1")

    with pytest.raises(
        WorkerTimeoutError, match=r"waited 1 s for rank 1 of 2 to connect"
    ) as caught:
        join(store, 0, 2, seconds=1.0)
    assert caught.value.ranks == (1,)


def test_nobody_listens_once_all_are_connected() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(3) as pool:
        meshes = [future.result() for future in joined(pool, HashStore(), 3)]
    # Two connections on each of three ranks.
    assert len(set(os.listdir("/proc/self/fd")) - before) == 6
    for mesh in meshes:
        mesh.close()
    assert set(os.listdir("/proc/self/fd")) <= before


def test_an_address_of_another_host_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "own_address", lambda *_, **__: "192.0.2.1")
    with pytest.raises(UnsupportedError, match=r"'192.0.2.1' is not an address of this host"):
        join(HashStore(), 0, 1, 5)


@pytest.mark.parametrize(
    ("name", "found", "is_everywhere"),
    [
        ("worker0.test", "127.0.1.1", True),
        ("worker0.test", "127.0.0.1", True),
        ("localhost", "127.0.0.1", False),
        ("127.0.0.1", "127.0.0.1", False),
    ],
)
def test_a_host_that_knows_its_name_as_the_loopback_is_found_by_others(
    name: str, found: str, is_everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = (socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [answer])

    with listening(name, 0) as listener:
        bound = ipaddress.ip_address(listener.getsockname()[0])
        assert bound.is_unspecified is is_everywhere


def test_an_interface_has_an_address() -> None:
    assert address_of_interface("lo") == "127.0.0.1"
    with pytest.raises(UnsupportedError, match=r"'no such network'.* This host has .*lo"):
        address_of_interface("no such network")


def talk(
    store: Store, rank: int, size: int, settings: list[dict[str, str]], seconds: float = 60
) -> Outcome | bool:
    """Whether what was said was encrypted, or what was raised."""
    os.environ.update(settings[rank])
    try:
        communicator = NetworkCommunicator(
            store, rank, size, backend="tcp", timeout_seconds=seconds
        )
    except CommunicationError as error:
        return type(error).__name__, str(error), error.ranks, 0.0
    with communicator:
        for length in (1, 1_000_001, 1):
            total = torch.ones(length)
            communicator.all_reduce(ReduceOp.SUM, [total])
            assert bool((total == size).all())
        return _is_encrypted(communicator)


def _is_encrypted(communicator: NetworkCommunicator) -> bool:
    connections = communicator._link.transport._connections  # type: ignore[attr-defined]
    return all(isinstance(one._socket, ssl.SSLSocket) for one in connections.values())


def test_large_and_small_messages_are_encrypted_where_that_is_asked_for(tmp_path: Path) -> None:
    authority = new_authority()
    settings = [keys(tmp_path, authority, f"host{rank}.test") for rank in range(3)]

    assert run_ranks(3, talk, settings) == [True] * 3
    assert run_ranks(2, talk, [{}, {}]) == [False] * 2


def test_the_store_is_encrypted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in keys(tmp_path, new_authority(), "host.test").items():
        monkeypatch.setenv(name, value)
    served = serve_store("127.0.0.1", listening("127.0.0.1", 0), b"key", encryption())
    address = served.host, served.port
    try:
        greeted = call(address, b"key", 1, encryption(), time.monotonic() + 20)
        assert isinstance(greeted.socket, ssl.SSLSocket)
        store_at(address, greeted).set("key", "value")
        assert served.get("key") == b"value"
        # Who knows the token but has no certificate comes no further.
        with pytest.raises(OSError):  # noqa: PT011 (whatever a broken handshake gives)
            call(address, b"key", 2, None, time.monotonic() + 0.3)
    finally:
        served.close()


def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    settings = []
    for rank in range(2):
        (folder := tmp_path / str(rank)).mkdir()
        settings.append(keys(folder, new_authority(), f"host{rank}.test"))

    # The first waits in vain for a certificate that it can trust.
    first, second = run_ranks(2, talk, settings, 5.0)

    assert (first[0], first[2]) == ("WorkerTimeoutError", (1,))
    assert "was refused" in first[1]
    assert (second[0], second[2]) == ("WorkerLostError", (0,))
    assert "certificate verify failed" in second[1]


def test_encryption_on_some_ranks_alone_is_an_error(tmp_path: Path) -> None:
    authority = new_authority()
    for kind, message, *_ in run_ranks(2, talk, [keys(tmp_path, authority, "a.test"), {}]):
        assert kind == "JobMismatchError"
        assert "Encrypt on all ranks or on none" in message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({f"{TLS}_CERT": "here.pem"}, f"needs {TLS}_PKEY and {TLS}_CA_FILE too"),
        (
            {f"{TLS}_{which}": "/no/such/file" for which in ("PKEY", "CERT", "CA_FILE")},
            "could not be used together",
        ),
        ({"GLOO_DEVICE_TRANSPORT": "TLS"}, "is 'TLS'. It must be 'TCP_TLS'"),
        ({f"{TLS}_CERTIFICATE": "here.pem"}, f"no setting {TLS}_CERTIFICATE"),
        ({"GLOO_DEVICE_TRANSPORT": "TCP", f"{TLS}_CERT": "here.pem"}, "nothing would be encrypted"),
    ],
)
def test_settings_that_are_missing_unreadable_or_misspelt_are_an_error(
    settings: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"GLOO_DEVICE_TRANSPORT": "TCP_TLS", **settings}.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(UnsupportedError, match=words):
        join(HashStore(), 0, 1)
