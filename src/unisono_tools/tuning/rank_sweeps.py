"""Measures between ranks: those of a launched job, or processes of this host."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from unisono.communicators import connect
from unisono.communicators.hosts import Layout, host_identity
from unisono.communicators.network import NetworkCommunicator
from unisono.communicators.stores import say_to_all
from unisono.costs import Tuning
from unisono.errors import TuningError
from unisono.kernels import native_core
from unisono_tools.processes import quick_processes
from unisono_tools.tuning.measured import Measured
from unisono_tools.tuning.sweeps import all_reduce_sweep

# How long a rank may be silent.
_PATIENCE_SECONDS = 60.0


def rank_sweeps(
    store: Store, rank: int, size: int, sizes: Sequence[int], seconds: float
) -> Iterator[Measured]:
    """Measures the links between ranks. All ranks call it, and rank 0 gets all results.

    Inside hosts and between hosts, it measures two ranks first and then all, which shows the cost
    of further messages.
    """
    layout = _layout(store, rank, size)
    number, position = layout.place(rank)
    inside = len(layout.hosts[number])
    if native_core().kernel is not None:
        yield from _group(f"{number}/inside", store, position, inside, sizes, seconds)
    yield from _group(f"{number}/loopback", store, position, inside, sizes, seconds)
    if position == 0:
        for link in ("between", "tcp"):
            yield from _group(f"all/{link}", store, number, len(layout.hosts), sizes, seconds)


def cluster_sweep(
    store: Store, rank: int, size: int, sizes: Sequence[int], seconds: float, tuning: Tuning
) -> Iterator[Measured]:
    """Measures all-reduces between all ranks of all hosts, as they run with that tuning.

    Nothing is measured on one host, where `rank_sweeps` has done so, and where the hosts have
    different numbers of ranks.
    """
    layout = _layout(PrefixStore("cluster", store), rank, size)
    if len(layout.hosts) == 1 or not layout.is_regular:
        return
    link = "tcp" if tuning.is_tcp_faster else "between"
    with connect(
        PrefixStore("whole", store), rank, size, timeout_seconds=_PATIENCE_SECONDS, tuning=tuning
    ) as communicator:
        for one in all_reduce_sweep(link, communicator, sizes, seconds):
            yield one._replace(num_hosts=len(layout.hosts))
        communicator.barrier()


def _layout(store: Store, rank: int, size: int) -> Layout:
    said = say_to_all(
        PrefixStore("hosts", store), rank, size, host_identity(), timeout_seconds=_PATIENCE_SECONDS
    )
    return Layout.of(said)


def leave(store: Store, rank: int, size: int) -> None:
    """Lets rank 0, which may serve the store, leave last."""
    if rank > 0:
        store.add("left", 1)
        return
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while store.add("left", 0) < size - 1:
        if time.monotonic() > deadline:
            raise TuningError(
                f"Rank 0 has measured and waited {_PATIENCE_SECONDS:g} s for the other {size - 1} "
                "ranks to end. Check their logs."
            )
        time.sleep(0.05)


def _group(
    name: str, store: Store, rank: int, size: int, sizes: Sequence[int], seconds: float
) -> Iterator[Measured]:
    link = name.rsplit("/", 1)[1]
    for count in sorted({2, size} if size > 1 else set()):
        if rank >= count:
            continue
        backend = "tcp" if link == "tcp" else "gloo"
        make = connect if link == "inside" else partial(NetworkCommunicator, backend=backend)
        prefixed = PrefixStore(f"{name}/{count}", store)
        with make(prefixed, rank, count, timeout_seconds=_PATIENCE_SECONDS) as communicator:
            yield from all_reduce_sweep(link, communicator, sizes, seconds)
            communicator.barrier()


def local_rank_sweeps(size: int, sizes: Sequence[int], seconds: float) -> Iterator[Measured]:
    """Measures the links between processes of this host, which end with the iteration."""
    context = quick_processes("unisono.communicators")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[BaseProcess] = []
    ours, theirs = context.Pipe(duplex=False)
    try:
        for rank in range(size):
            pipe = theirs if rank == 0 else None
            arguments = (pipe, store.port, rank, size, sizes, seconds)
            processes.append(context.Process(target=_run, args=arguments, daemon=True))
            processes[-1].start()
        theirs.close()
        yield from _received(ours)
    finally:
        ours.close()
        for process in processes:
            process.join(timeout=2)
            process.kill()
            process.join()


def _received(pipe: Connection) -> Iterator[Measured]:
    """Yields what rank 0 sends, until it sends the end."""
    while pipe.poll(_PATIENCE_SECONDS):
        try:
            found = pipe.recv()
        except EOFError:
            raise TuningError(
                "Rank 0 of the processes that measure has ended without an answer. Check its "
                "messages above, and try a smaller -n."
            ) from None
        if found is None:
            return
        if isinstance(found, str):
            raise TuningError(f"The processes that measure failed:\n{found}")
        yield found
    raise TuningError(
        f"Rank 0 of the processes that measure has not answered for {_PATIENCE_SECONDS:g} s. Try a "
        "smaller -n, or try again when the machine is less busy."
    )


def _run(
    pipe: Connection | None, port: int, rank: int, size: int, sizes: Sequence[int], seconds: float
) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    try:
        for found in rank_sweeps(store, rank, size, sizes, seconds):
            if pipe is not None:
                pipe.send(found)
        leave(store, rank, size)
        if pipe is not None:
            pipe.send(None)
    except Exception:
        with suppress(OSError):
            if pipe is not None:
                pipe.send(traceback.format_exc())
        raise
