"""Collectives between the processes of one host, through memory that they share."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from unisono.communicators.communicator import Communicator
from unisono.communicators.headers import check_terms
from unisono.communicators.segment import share_memory
from unisono.errors import (
    CommunicationError,
    ContextError,
    UnequalCollectivesError,
    UnsupportedError,
    WorkerLostError,
    WorkerTimeoutError,
)
from unisono.kernels import divide, native_core, tree_reduce, wide_dtype
from unisono.options import ReduceOp
from unisono.system import create_segment

if TYPE_CHECKING:
    from unisono._native import SharedGroup

_MAX_RANKS = 256
_HOST_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
# In the order that the native core knows them.
_OPS = (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PROD)
_log = logging.getLogger(__name__)
_ERRORS: dict[str, type[CommunicationError]] = {
    "lost": WorkerLostError,
    "timeout": WorkerTimeoutError,
    "unequal": UnequalCollectivesError,
}


class SharedMemoryCommunicator(Communicator):
    """Ranks that are processes of one host and share memory.

    Every rank makes it at the same time. The others find a rank that ends within two seconds, and
    one that does not come within `timeout_seconds`; then the communicator ends on all ranks with
    the same error. It belongs to the process that made it, not to forked children. Threads of a
    process may share it: it does one collective after the other.

    Tensors that are contiguous are read and written in place. Others are copied first, and the
    result is copied back.

    Args:
        store: One store, or one prefix of it, serves one communicator.
        can_allocate: Whether `allocate` returns shared memory. If not, the communicator keeps no
            file descriptor where the ranks can see each other in `/proc`.
    """

    name = "shared memory"

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout_seconds: float = 300.0,
        joining_seconds: float | None = None,
        can_allocate: bool = True,
    ) -> None:
        if not 0 <= rank < size <= _MAX_RANKS:
            raise UnsupportedError(
                f"`rank` must be from 0 to `size - 1` and `size` at most {_MAX_RANKS}, got rank "
                f"{rank} and size {size}."
            )
        super().__init__(rank, size)
        self.timeout_seconds = self._timeout_seconds = timeout_seconds
        self._is_full = not can_allocate
        self._group: SharedGroup = share_memory(
            store,
            rank,
            size,
            timeout_seconds if joining_seconds is None else joining_seconds,
            lambda: create_segment(_native_group().segment_bytes(size)),
            self._enter,
        )
        # Looked up once: a tiny collective takes half a microsecond.
        self._all_reduce = self._group.all_reduce
        try:
            self._group.join(can_allocate)
        except BaseException:
            self.close()
            raise

    def _enter(self, fd: int) -> SharedGroup:
        return _native_group()(
            tensor_type=torch.Tensor,
            ops=_OPS,
            raise_failure=_raise_failure,
            fd=fd,
            rank=self.rank,
            size=self.size,
            timeout_seconds=self._timeout_seconds,
        )

    def all_reduce(self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None) -> None:
        if self._all_reduce(op, terms, count) is not None:
            total = self._combine(op, terms, count)
            terms[0].detach().copy_(total)

    def reduce_scatter(
        self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None
    ) -> Tensor:
        part = self._group.reduce_scatter(op, terms, count)
        if isinstance(part, Tensor):
            return part
        return self._own_part(self._combine(op, terms, count))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        gathered: list[Tensor] = self._gather(tensor, None)
        return gathered

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        self.check_root(root)
        gathered: list[Tensor] | None = self._gather(tensor, root)
        return gathered

    def _gather(self, tensor: Tensor, root: int | None) -> Any:
        tensors = self._group.gather(tensor, root)
        if isinstance(tensors, str):
            tensors = self._group.gather(_plain(tensor), root)
        if isinstance(tensors, str):
            raise _refusal("gathered", tensor, tensors)
        return tensors

    def reduce_parts(self, op: ReduceOp, terms: Sequence[Tensor]) -> None:
        if self._group.reduce_parts(op, terms) is not None:
            super().reduce_parts(op, terms)

    def lead(
        self,
        greeting: bytes,
        terms: Sequence[Tensor] = (),
        work: Callable[[list[Tensor]], None] | None = None,
    ) -> Sequence[bytes] | None:
        answer = self._group.lead(greeting, terms, work)
        return super().lead(greeting, terms, work) if isinstance(answer, str) else answer

    def share_parts(self, tensor: Tensor) -> None:
        refusal = self._group.share_parts(tensor)
        if refusal is not None:
            raise _refusal("shared", tensor, refusal)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        self.check_root(root)
        if self._group.broadcast(tensor, root) is None:
            return
        plain = _plain(tensor)
        refusal = self._group.broadcast(plain, root)
        if refusal is not None:
            raise _refusal("broadcast", tensor, refusal)
        tensor.detach().copy_(plain)

    def barrier(self) -> None:
        self._group.barrier()

    def allocate(self, num_bytes: int) -> Tensor:
        """Returns bytes from which collectives need not copy. All ranks ask for the same number.

        They are given back with the last tensor and the communicator, not before. Where a rank has
        no more memory to share, all ranks get separate memory, from which collectives copy.
        """
        if num_bytes * self.size > _HOST_BYTES:
            raise MemoryError(
                f"{num_bytes} bytes on each of {self.size} ranks are more than this host has. "
                "Allocate less, or reuse what was allocated."
            )
        memory, refusal = None, torch.zeros(1, dtype=torch.uint8)
        if not self._is_full:
            try:
                memory = self._group.allocate(num_bytes)
            except MemoryError:
                refusal[0] = 1
            refused = [rank for rank, one in enumerate(self.all_gather(refusal)) if one.item()]
            if refused:
                self._is_full = True
                _log.warning(
                    "Rank %s cannot share %d more bytes: limits of the process, or of the host. "
                    "All ranks use memory of their own from now on, which takes copies.",
                    ", ".join(map(str, refused)),
                    num_bytes,
                )
        return super().allocate(num_bytes) if self._is_full or memory is None else memory

    def set_timeout(self, seconds: float) -> None:
        self._group.set_timeout(seconds)

    def check_health(self) -> None:
        self._group.check_health()

    def close(self) -> None:
        """Leaves. Tensors that were allocated stay good. May be called twice."""
        self._group.close()

    def _combine(self, op: ReduceOp, terms: Sequence[Tensor], count: int | None) -> Tensor:
        """Reduces what the native core does not take as it is."""
        plain = [_plain(term) if term.layout is torch.strided else term for term in terms]
        check_terms("all_reduce", op, plain)
        refusal = self._all_reduce(op, plain, count)
        if refusal is None:
            return plain[0]
        dtype = plain[0].dtype
        if not dtype.is_complex:
            raise _refusal("reduced", plain[0], refusal)
        # The native core knows complex numbers as pairs, which products are not.
        gathered = self.all_gather(torch.stack([term.to(wide_dtype(dtype)) for term in plain]))
        everything = [term for terms_of_rank in gathered for term in terms_of_rank]
        if op is not ReduceOp.MEAN:
            return tree_reduce(op, everything).to(dtype)
        return divide(tree_reduce(ReduceOp.SUM, everything), count or len(everything), dtype)


def can_share_memory(size: int) -> bool:
    """Returns whether this process can make and map memory for so many ranks of its host."""
    if native_core().kernel is None:
        return False
    try:
        num_bytes = _native_group().segment_bytes(size)
        fd = create_segment(num_bytes)
        try:
            mmap.mmap(fd, num_bytes).close()
        finally:
            os.close(fd)
    except (OSError, UnsupportedError) as error:
        _log.warning("This process cannot share memory with others of its host: %s", error)
        return False
    return True


def _native_group() -> type[SharedGroup]:
    core = native_core()
    if core.kernel is not None:
        from unisono import _native

        if hasattr(_native, "SharedGroup"):
            return _native.SharedGroup
    raise UnsupportedError(
        "Shared memory between processes needs Linux and the native core, but here it is "
        f"{core.status}. Use another communicator."
    )


def _raise_failure(kind: str, text: str, ranks: list[int]) -> NoReturn:
    if kind == "misuse":
        raise ContextError(text)
    raise _ERRORS[kind](text, ranks)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _refusal(what: str, tensor: Tensor, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"A {tensor.dtype} tensor of shape {tuple(tensor.shape)} on {tensor.device} cannot be "
        f"{what} through shared memory: it {reason}. Give a dense CPU tensor."
    )
