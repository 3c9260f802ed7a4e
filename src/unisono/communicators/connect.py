"""The right communicator for where the ranks are."""

from __future__ import annotations

import functools
import json
import logging
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store

from unisono.communicators.choice import Carrier, Choice, Engine, choose
from unisono.communicators.communicator import Communicator, IdentityCommunicator
from unisono.communicators.delegating import StagedCommunicator
from unisono.communicators.gloo import GlooMaker
from unisono.communicators.headers import ranks_in_words
from unisono.communicators.hierarchical import HierarchicalCommunicator
from unisono.communicators.hosts import ON_ONE_HOST, Layout, host_identity, named_globally
from unisono.communicators.link import Part
from unisono.communicators.mpi import is_launched_by_mpi, mpi_ranks
from unisono.communicators.nccl import NcclCommunicator, have_own_gpus
from unisono.communicators.network import NetworkCommunicator
from unisono.communicators.shared_memory import SharedMemoryCommunicator, can_share_memory
from unisono.communicators.sockets import encryption
from unisono.communicators.stores import DEFAULT_TIMEOUT_SECONDS, Countdown, say_to_all
from unisono.communicators.watch import Watch, make_watch
from unisono.costs import Tuning
from unisono.errors import CommunicationError, JobMismatchError
from unisono.options import CommunicationImplementation

_GRACE_SECONDS = 2.0
# Sockets, pipes and selectors that do not depend on the number of ranks.
_FILES = 16
_FILES_FOR_SHARED_MEMORY = 6
# The stacks of the threads of an engine and of the watch, and rooms for messages.
_ROOM_BYTES = 96 << 20
_log = logging.getLogger(__name__)


def connect(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout_seconds: float | None = None,
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO,
    joining_seconds: float | None = None,
    tuning: Tuning | None = None,
    gpus: Sequence[str] = (),
    gpu: torch.device | None = None,
    can_allocate: bool = True,
    gloo: GlooMaker | None = None,
) -> Communicator:
    """Connects the ranks of a job, each of which calls this, and returns what suits them.

    `choose` says what that is. GPU tensors travel through NCCL with `NCCL`, and with `AUTO` if
    every rank has its own GPUs. NCCL adds in its own order. Otherwise GPU tensors travel through
    host memory, and sums have the order of the tree.

    Args:
        joining_seconds: How long to wait for the others to come here; `timeout_seconds` if not
            given.
        gpus: What tells the GPUs that this rank uses from all others, such as `gpu_identity`.
        gpu: The one that NCCL connects to those of other ranks; the current one if not given.
        can_allocate: Whether `allocate` returns memory that the ranks of a host share, which takes
            a file descriptor.
        gloo: Returns a group with Gloo of all ranks, where that is chosen; made if not given. Its
            argument raises if a rank is lost.
    """
    if size == 1:
        return IdentityCommunicator()
    timeout = DEFAULT_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
    left = Countdown(timeout if joining_seconds is None else joining_seconds, least=_GRACE_SECONDS)
    said = _survey(store, rank, size, implementation, gpus, left.seconds())
    layout = Layout.of([one["host"] for one in said])
    choice_with = functools.partial(
        choose,
        layout,
        has_native_core=all(one["core"] for one in said),
        implementation=implementation,
        # If some rank does not encrypt, the ranks find out when they connect.
        is_encrypted=any(one["tls"] for one in said),
        tuning=tuning,
    )
    choice = choice_with(has_mpi=all(one["mpi"] for one in said))
    if choice.engine is Engine.MPI and choice.carrier in (Carrier.HIERARCHICAL, Carrier.FLAT):
        # Only now: to start MPI takes time, and all processes.
        seconds = left.seconds()
        numbers, why = mpi_ranks(PrefixStore("mpi", store), rank, size, timeout_seconds=seconds)
        if not numbers:
            choice = choice_with(has_mpi=False)
            _log.warning("MPI has started this job and cannot connect its ranks: %s.", why)
    _check_limits([one["limits"] for one in said], choice)
    link = _Link(store, rank, size, timeout, left, gloo, can_allocate)
    chosen = link.connected(choice, layout)
    if torch.cuda.is_available():
        chosen = StagedCommunicator(chosen)
    is_auto = implementation is CommunicationImplementation.AUTO
    have_gpus = have_own_gpus([one["gpus"] for one in said])
    if implementation is CommunicationImplementation.NCCL or (is_auto and have_gpus):
        chosen = NcclCommunicator(chosen, gpu, timeout_seconds=timeout)
    else:
        chosen.cost = choice.cost
    _log.info("Rank %d of %d talks through %s: %s.", rank, size, chosen.name, choice.why)
    return chosen


def _survey(
    store: Store,
    rank: int,
    size: int,
    implementation: CommunicationImplementation,
    gpus: Sequence[str],
    timeout_seconds: float,
) -> list[dict[str, Any]]:
    """Returns by rank where the ranks are, and what each has."""
    own = {
        "wanted": implementation.value,
        "host": host_identity(),
        "core": can_share_memory(size),
        "mpi": is_launched_by_mpi(),
        "tls": encryption() is not None,
        "gpus": list(gpus) if distributed.is_nccl_available() else [],
        "limits": _own_limits(size),
    }
    prefixed = PrefixStore("survey", store)
    texts = say_to_all(prefixed, rank, size, json.dumps(own), timeout_seconds=timeout_seconds)
    said = [json.loads(text) for text in texts]
    wanted = [one["wanted"] for one in said]
    if odd := [other for other in range(size) if wanted[other] != implementation.value]:
        raise JobMismatchError(
            f"The ranks ask for different implementations: {wanted} by rank. Give every worker the "
            "same `CommunicationOptions`.",
            odd,
        )
    return said


class _Link(NamedTuple):
    """What it takes to make communicators between all ranks, or between some of them."""

    store: Store
    rank: int
    size: int
    timeout_seconds: float
    left: Countdown
    gloo: GlooMaker | None
    can_allocate: bool

    def connected(self, choice: Choice, layout: Layout) -> Communicator:
        if choice.carrier is Carrier.HIERARCHICAL:
            return self._hierarchical(choice, layout)
        if choice.carrier is Carrier.FLAT:
            return self._over_network("flat", self.rank, self.size, choice, gloo=self.gloo)
        return self._in_memory(self.store, self.rank, self.size, self.timeout_seconds)

    def _in_memory(self, store: Store, rank: int, size: int, timeout: float) -> Communicator:
        return SharedMemoryCommunicator(
            store,
            rank,
            size,
            timeout_seconds=timeout,
            joining_seconds=self.left.seconds(),
            can_allocate=self.can_allocate,
        )

    def _over_network(
        self, prefix: str, rank: int, size: int, choice: Choice, **options: Any
    ) -> NetworkCommunicator:
        return NetworkCommunicator(
            PrefixStore(prefix, self.store),
            rank,
            size,
            backend=choice.engine.value,
            timeout_seconds=self.timeout_seconds,
            constants=choice.link,
            joining_seconds=self.left.seconds(),
            **options,
        )

    def _hierarchical(self, choice: Choice, layout: Layout) -> Communicator:
        """Shared memory inside a host, and an engine between ranks of one position on each."""
        number, position = layout.place(self.rank)
        here, peers = layout.hosts[number], [ranks[position] for ranks in layout.hosts]
        with ExitStack() as made:
            with _named_globally(here):
                # The watch, which sees all hosts, is the first to say who is late.
                timeout = self.timeout_seconds + _GRACE_SECONDS
                store = PrefixStore(f"host {number}", self.store)
                inside = self._in_memory(store, position, len(here), timeout)
            made.callback(inside.close)
            watch, group = make_watch(
                PrefixStore("watch", self.store),
                self.rank,
                self.size,
                self.gloo if choice.engine is Engine.GLOO else None,
                timeout_seconds=self.timeout_seconds,
                joining_seconds=self.left.seconds(),
            )
            made.callback(watch.close)
            part = Part(watch, peers, layout.hosts, group)
            with _named_globally(peers, watch, "one on each host"):
                prefix = f"position {position}"
                between = self._over_network(prefix, number, len(peers), choice, part=part)
            made.pop_all()
        return HierarchicalCommunicator(
            inside, between, layout, watch, parts_bytes=choice.parts_bytes
        )


@contextmanager
def _named_globally(
    ranks: Sequence[int], watch: Watch | None = None, which: str = ON_ONE_HOST
) -> Iterator[None]:
    """Gives the ranks of an error of a part, which counts its own, the numbers of the whole.

    The errors of `watch`, which is over the whole, and of the store have them already.
    """
    try:
        yield
    except CommunicationError as error:
        if error.is_of_all or (watch is not None and error is watch.failure):
            raise
        raise named_globally(error, ranks, which) from error


def _own_limits(size: int) -> dict[str, Any]:
    """Returns what this process can have, as far as it needs it to connect `size` ranks.

    A rank that cannot open a socket in the middle would leave the others to wait for their timeout,
    and Gloo ends a process that cannot accept a connection. So every rank says it beforehand.
    """
    return {"files": _files_left(_most_files(size)), "room": _has_room()}


def _check_limits(limits: Sequence[Mapping[str, Any]], choice: Choice) -> None:
    is_shared = choice.carrier is Carrier.SHARED_MEMORY
    needed = _FILES_FOR_SHARED_MEMORY if is_shared else _most_files(len(limits))
    if short := [rank for rank, one in enumerate(limits) if one["files"] < needed]:
        found = ", ".join(str(limits[rank]["files"]) for rank in short)
        raise CommunicationError(
            f"Connecting {len(limits)} ranks needs {needed} more open files, but "
            f"{ranks_in_words(short)} can have only {found}. Raise the limit there (`ulimit -n`).",
            short,
        )
    short = [rank for rank, one in enumerate(limits) if not one["room"]]
    if short and not is_shared:
        raise CommunicationError(
            f"Connecting {len(limits)} ranks needs threads and {_ROOM_BYTES >> 20} MiB of address "
            f"space, which {ranks_in_words(short)} cannot have. Raise the limits there "
            "(`ulimit -v`, `ulimit -u`).",
            short,
        )


def _most_files(size: int) -> int:
    return _FILES + 2 * size


def _files_left(most: int) -> int:
    """Returns how many files can be opened, or `most`."""
    opened: list[int] = []
    with suppress(OSError):
        opened.append(os.open("/", os.O_RDONLY))
        while len(opened) < most:
            opened.append(os.dup(opened[0]))
    for one in opened:
        os.close(one)
    return len(opened)


def _has_room() -> bool:
    """Whether there is room for threads and messages."""
    thread = threading.Thread(target=lambda: None, name="unisono limits", daemon=True)
    try:
        # Pages that nobody touches cost nothing.
        mmap.mmap(-1, _ROOM_BYTES, access=mmap.ACCESS_COPY).close()
        thread.start()
    except (OSError, RuntimeError):
        return False
    thread.join()
    return True
