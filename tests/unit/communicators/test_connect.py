"""What is chosen for ranks, and what is said where that cannot be."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from processes.harness import Ranks, run_ranks
from torch import distributed
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from unisono.communicators import gloo, stores
from unisono.communicators.connect import _named_globally, connect
from unisono.communicators.gloo import break_connections, make_gloo_group
from unisono.communicators.hosts import own_address
from unisono.communicators.mpi import make_mpi_communicator
from unisono.communicators.nccl import have_own_gpus
from unisono.communicators.network import NetworkCommunicator
from unisono.errors import (
    CommunicationError,
    UnsupportedError,
    WorkerLostError,
    WorkerTimeoutError,
)
from unisono.kernels import native_core
from unisono.options import CommunicationImplementation, ReduceOp

IMPLEMENTATIONS = list(CommunicationImplementation)


def chosen(store: Store, rank: int, size: int) -> tuple[list[str], list[str]]:
    """The names of what is chosen, and the log lines."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("unisono.communicators.connect")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    names = []
    for implementation in IMPLEMENTATIONS[:2]:
        prefixed = PrefixStore(implementation.value, store)
        with connect(prefixed, rank, size, implementation=implementation) as communicator:
            total = torch.ones(2)
            communicator.all_reduce(ReduceOp.SUM, [total])
            assert total.tolist() == [size, size]
            communicator.barrier()
            names.append(communicator.name)
    return names, lines


def test_ranks_of_one_host_share_memory_and_a_log_line_says_so() -> None:
    fast = "Gloo" if native_core().kernel is None else "shared memory"
    for names, lines in run_ranks(2, chosen):
        assert [name.split(",")[0] for name in names] == [fast, "Gloo"]
        assert len(lines) == 2
        assert lines[1].endswith("asked for.")


def connect_but_for_one(store: Store, rank: int, size: int) -> tuple[str, tuple[int, ...], str]:
    """Rank 1 says where it listens, and is gone when the others call it."""
    if rank == 1:
        group: Any = distributed.ProcessGroupGloo
        with pytest.raises(RuntimeError):
            group(PrefixStore("gloo 0", store), rank, size, timedelta(milliseconds=1))
        store.set("published", "")
        own_address(store, rank, size, timeout_seconds=60)
        return "", (), ""
    store.wait(["published"], timedelta(seconds=60))
    try:
        make_gloo_group(store, rank, size, timeout_seconds=60, joining_seconds=12)
    except CommunicationError as error:
        return type(error).__name__, error.ranks, str(error)
    return "nothing", (), ""


def test_a_rank_that_gloo_cannot_reach_is_named() -> None:
    results = run_ranks(3, connect_but_for_one)

    for kind, ranks, message in (results[0], results[2]):
        assert (kind, ranks) == ("WorkerTimeoutError", (1,))
        assert "for rank 1 of 3 to connect" in message


class AnotherStore(Store):
    """Does all that the store of a job does, and what a test adds."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        return self.store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self.store.multi_get(keys)

    def add(self, key: str, amount: int) -> int:
        return self.store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.store.wait(list(keys), timeout or timedelta(seconds=60))


class SilentStore(AnotherStore):
    """Says where this rank listens, and never learns where the others do."""

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, value)
        self.store.set("published", "")

    def get(self, key: str) -> bytes:
        self.store.wait(["0 has given up", "2 has given up"], timedelta(seconds=60))
        raise RuntimeError("The others have given up.")

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.get(keys[0])


def connect_to_a_silent_one(store: Store, rank: int, size: int) -> float:
    """Rank 1 listens and never calls. Returns how long the others have tried to connect to it."""
    first = PrefixStore("gloo 0", store)
    if rank == 1:
        group: Any = distributed.ProcessGroupGloo
        own_address(store, rank, size, timeout_seconds=60)
        with pytest.raises(RuntimeError, match="given up"):
            group(SilentStore(first), rank, size, timedelta(seconds=60))
        return 0.0
    began = time.monotonic()
    with suppress(CommunicationError):
        make_gloo_group(store, rank, size, timeout_seconds=60, joining_seconds=4)
    while any(thread.name == "unisono gloo" for thread in threading.enumerate()):
        time.sleep(0.01)
    first.set(f"{rank} has given up", "")
    return time.monotonic() - began


def test_nothing_tries_to_connect_any_longer_than_it_may() -> None:
    # Gloo tries for five times its timeout, if one rank says nothing after the first connection.
    assert max(run_ranks(3, connect_to_a_silent_one)) < 18


class DyingStore(AnotherStore):
    """Ends this process once it has said where it listens for Gloo."""

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, value)
        if "gloo 0/" in key:
            os.kill(os.getpid(), signal.SIGKILL)


def connect_to_a_dying_one(store: Store, rank: int, size: int) -> tuple[str, tuple[int, ...]]:
    try:
        with NetworkCommunicator(
            DyingStore(store) if rank == 1 else store, rank, size, timeout_seconds=60
        ):
            return "nothing", ()
    except CommunicationError as error:
        return type(error).__name__, error.ranks


def test_a_rank_that_dies_while_gloo_connects_is_lost() -> None:
    with Ranks(3, connect_to_a_dying_one) as ranks:
        results = ranks.results()

    assert results == dict.fromkeys((0, 2), ("WorkerLostError", (1,)))


def no_threads_are_left() -> bool:
    deadline = time.monotonic() + 60
    while is_left := any(one.name == "unisono gloo" for one in threading.enumerate()):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return not is_left


class UnluckyStore(AnotherStore):
    """Gives no address in the first attempt of Gloo to connect."""

    def get(self, key: str) -> bytes:
        if "gloo 0/" in key:
            raise RuntimeError("No route to host")
        return self.store.get(key)


def test_all_ranks_try_again_where_one_could_not_connect(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo, "_FIRST_SECONDS", 0.5)
    job = HashStore()
    stores: list[Store] = [job, UnluckyStore(job), job]

    def summed(rank: int) -> float:
        group = make_gloo_group(stores[rank], rank, 3, timeout_seconds=60)
        total = torch.ones(1)
        group.allreduce([total]).wait()
        return total.item()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(summed, range(3))) == [3.0] * 3
    assert "No route to host" in caplog.text
    assert no_threads_are_left()


def test_ctrl_c_ends_what_connects_and_the_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_CHECK_SECONDS", 0.0)
    monkeypatch.setattr(stores, "_GRACE_SECONDS", 0.1)
    job, ended = HashStore(), threading.Event()

    def press_ctrl_c(_: float) -> None:
        raise KeyboardInterrupt

    def connect_for_ever(is_over: threading.Event) -> None:
        is_over.wait(60)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        stores.connected(job, 0, 2, "Gloo", connect_for_ever, 60.0, press_ctrl_c)
    assert ended.wait(30)
    with pytest.raises(WorkerTimeoutError, match=r"for rank 0 of 2 .*Gloo") as caught:
        stores.connected(job, 1, 2, "Gloo", connect_for_ever, 60.0)
    assert caught.value.ranks == (0,)


def test_one_rank_needs_no_store() -> None:
    with connect(HashStore(), 0, 1) as communicator:
        assert communicator.name == "one rank alone"


def ask_differently(store: Store, rank: int, size: int) -> tuple[str, str]:
    try:
        connect(store, rank, size, timeout_seconds=60, implementation=IMPLEMENTATIONS[rank])
    except CommunicationError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_ranks_that_ask_for_different_implementations_are_told() -> None:
    for kind, message in run_ranks(2, ask_differently):
        assert kind == "JobMismatchError"
        assert "['AUTO', 'RING']" in message


def beside_the_default_group(store: Store, rank: int, size: int) -> list[float]:
    distributed.init_process_group("gloo", store=PrefixStore("own", store), rank=rank, world_size=2)
    ours, theirs = torch.ones(3), torch.ones(3)
    with NetworkCommunicator(PrefixStore("ours", store), rank, size) as communicator:
        communicator.all_reduce(ReduceOp.SUM, [ours])
        distributed.all_reduce(theirs)
        communicator.barrier()
    distributed.all_reduce(theirs)
    distributed.barrier()
    distributed.destroy_process_group()
    return [ours[0].item(), theirs[0].item()]


def test_the_default_group_of_torch_is_left_to_the_user() -> None:
    assert run_ranks(2, beside_the_default_group) == [[2.0, 4.0]] * 2


def test_a_group_ends_all_its_connections_though_one_has_ended_before() -> None:
    store = HashStore()

    def make(rank: int) -> Any:
        return make_gloo_group(store, rank, 3, timeout_seconds=60)

    with ThreadPoolExecutor(3) as pool:
        first, second, third = pool.map(make, range(3))
    waiting = first.recv([torch.empty(1)], third.rank(), 1)
    break_connections(second)
    with pytest.raises(RuntimeError):
        first.recv([torch.empty(1)], second.rank(), 1).wait(timedelta(seconds=60))
    break_connections(first)

    with pytest.raises(RuntimeError) as caught:
        waiting.wait(timedelta(milliseconds=9999))
    assert "9999ms" not in str(caught.value)


def encrypted_in_no_known_way(store: Store, rank: int, size: int) -> str:
    os.environ["GLOO_DEVICE_TRANSPORT"] = "no such transport"
    with pytest.raises(UnsupportedError) as caught:
        make_gloo_group(store, rank, size, timeout_seconds=60)
    return str(caught.value)


def test_encryption_that_torch_cannot_do_is_an_error() -> None:
    # In its own process: torch looks at the variable once.
    (message,) = run_ranks(1, encrypted_in_no_known_way)

    assert message.startswith("GLOO_DEVICE_TRANSPORT is 'no such transport'")


@pytest.mark.skipif(find_spec("mpi4py") is not None, reason="mpi4py is here")
def test_mpi_without_mpi4py_is_an_error() -> None:
    with pytest.raises(UnsupportedError, match=r"MPI needs mpi4py.*unisono\[mpi\]"):
        make_mpi_communicator(HashStore(), 0, 2, timeout_seconds=5)


def test_nccl_is_for_ranks_with_gpus_of_their_own() -> None:
    assert have_own_gpus([["a", "b"], ["c", "d"]])
    # Virtual GPUs of one rank.
    assert have_own_gpus([["a", "a"], ["b"]])
    assert not have_own_gpus([["a"], ["a"]])
    assert not have_own_gpus([["a"], []])
    assert not have_own_gpus([[], []])


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL may well be here")
def test_nccl_without_a_gpu_is_an_error() -> None:
    from unisono.communicators.communicator import IdentityCommunicator
    from unisono.communicators.nccl import NcclCommunicator

    with pytest.raises(UnsupportedError, match="sees 0 GPUs"):
        NcclCommunicator(IdentityCommunicator())


def test_ranks_of_a_part_get_the_numbers_of_the_whole_unless_they_have_them() -> None:
    lost = pytest.raises(WorkerLostError, match="counted from 0 there")
    with lost as caught, _named_globally([2, 5]):
        raise WorkerLostError("It has ended.", [1])
    assert caught.value.ranks == (5,)

    lost = pytest.raises(WorkerLostError, match="The coordinator")
    with lost as caught, _named_globally([2, 5]), stores.translated_store_errors():
        raise distributed.DistNetworkError("The connection broke.")
    assert caught.value.ranks == (0,)

    elsewhere = WorkerLostError("It has ended.", [7])
    elsewhere.is_of_all = True
    with pytest.raises(WorkerLostError) as caught, _named_globally([2, 5]):
        raise elsewhere
    assert caught.value is elsewhere
