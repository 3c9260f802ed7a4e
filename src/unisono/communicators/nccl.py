"""GPU tensors through NCCL, one GPU per rank; everything else through another communicator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import PrefixStore, Store

from unisono.communicators.communicator import Communicator, slice_of
from unisono.communicators.delegating import DelegatingCommunicator
from unisono.communicators.headers import Header, check_gathered
from unisono.communicators.stores import DEFAULT_TIMEOUT_SECONDS, store_for_threads
from unisono.errors import CommunicationError, UnsupportedError, WorkerTimeoutError
from unisono.kernels import divide, tree_reduce, undivided, wide_dtype
from unisono.options import ReduceOp

_LOOK_SECONDS = 1.0


class NcclCommunicator(DelegatingCommunicator):
    """NCCL for GPU tensors, and `on_host` for host tensors and to agree on what is called.

    NCCL adds in its own order, so sums of floating point numbers may differ in the last bits
    from those of other communicators; they are the same on all ranks. Sums of half precision are
    rounded at every step. What NCCL has no number for goes through `on_host`.
    """

    def __init__(
        self,
        on_host: Communicator,
        store: Store,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        if not (torch.cuda.is_available() and distributed.is_nccl_available()):
            raise UnsupportedError(
                f"NCCL needs a GPU and a torch that was built with it; torch {torch.__version__} "
                f"sees {torch.cuda.device_count()} GPUs. Use the implementation AUTO or RING."
            )
        super().__init__(on_host)
        self.cost = None
        self.timeout_seconds = self._timeout_seconds = timeout_seconds
        self._sequence = 0
        make: Any = distributed.ProcessGroupNCCL
        options = make.Options()
        options._timeout = timedelta(seconds=timeout_seconds)
        # Its threads look into the store all the time.
        self._store = store_for_threads(store, self.rank, timeout_seconds)
        self._group = make(PrefixStore("nccl", self._store), self.rank, self.size, options)

    @property
    def name(self) -> str:
        return f"NCCL for GPU tensors, {self._carrier.name} for others"

    def keeps_order(self, tensor: Tensor) -> bool:
        return not _nccl_adds(tensor)

    def all_reduce(self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None) -> None:
        if not _nccl_adds(terms[0]):
            return self._carrier.all_reduce(op, terms, count)
        header = Header.of_terms("all_reduce", self._sequence + 1, op, terms, count)
        self._agree(header)
        total = self._sum_of_own(op, terms)
        self._run(header, lambda: self._group.allreduce([total], _nccl_op(op)))
        if op is ReduceOp.MEAN:
            total = divide(total, count or self.size * len(terms), total.dtype)
        terms[0].detach().copy_(total)
        return None

    def reduce_scatter(
        self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None
    ) -> Tensor:
        copies = [term.detach().clone() for term in terms]
        self.all_reduce(op, copies, count)
        total = copies[0].view(-1)
        return total[slice_of(self.rank, self.size, len(total))].clone()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        if not tensor.is_cuda:
            return self._carrier.all_gather(tensor)
        own = tensor.detach().contiguous()
        header = Header.of_tensor("all_gather", self._sequence + 1, own)
        headers = self._agree(header)
        gathered = [own.new_empty(other.shape) for other in headers]
        gathered[self.rank].copy_(own)
        for root, one in enumerate(gathered):
            if one.numel():
                self._broadcast(header, one, root)
        return gathered

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        self.check_root(root)
        if not tensor.is_cuda:
            return self._carrier.broadcast(tensor, root)
        header = Header.of_tensor("broadcast", self._sequence + 1, tensor, root)
        self._agree(header)
        return self._broadcast(header, tensor.detach(), root)

    def set_timeout(self, seconds: float) -> None:
        self._timeout_seconds = seconds
        self._group._set_default_timeout(timedelta(seconds=seconds))
        self._carrier.set_timeout(seconds)

    def close(self) -> None:
        if self._group is not None:
            self._group.abort()
            self._group = None
        self._carrier.close()

    def _agree(self, header: Header) -> list[Header]:
        """Returns the headers of all ranks: NCCL must not begin where they differ."""
        if self._group is None:
            raise CommunicationError(
                f"{header} was called on a closed communicator. Make a new one with all ranks."
            )
        self._sequence += 1
        return check_gathered(header, self._carrier.all_gather(header.as_tensor()))

    def _broadcast(self, header: Header, tensor: Tensor, root: int) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank = root
        raw = tensor.view(-1).view(torch.uint8)
        self._run(header, lambda: self._group.broadcast([raw], options))

    def _run(self, header: Header, begin: Callable[[], Any]) -> None:
        """Waits for NCCL with an eye on the other ranks, which it would not notice to be gone."""
        work = begin()
        deadline = time.monotonic() + self._timeout_seconds
        look = time.monotonic() + _LOOK_SECONDS
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise WorkerTimeoutError(
                    f"Rank {self.rank} waited {self._timeout_seconds:g} s for NCCL in {header}. "
                    "Check the GPUs and the network, or raise `timeout_seconds` if they are slow."
                )
            if time.monotonic() > look:
                self._carrier.check_health()
                look = time.monotonic() + _LOOK_SECONDS
            time.sleep(0)
        work.wait()

    def _sum_of_own(self, op: ReduceOp, terms: Sequence[Tensor]) -> Tensor:
        own = terms[0].detach().clone() if len(terms) == 1 else tree_reduce(undivided(op), terms)
        # A mean of half precision is divided before it is rounded.
        return own.to(wide_dtype(own.dtype)) if op is ReduceOp.MEAN else own


def gpu_identity(device: torch.device) -> str:
    """Returns what tells a GPU from all others, on any host."""
    return str(torch.cuda.get_device_properties(device).uuid)


def have_own_gpus(by_rank: Sequence[Sequence[str]]) -> bool:
    """Whether every rank has GPUs, and no two ranks use the same one."""
    used = [gpu for gpus in by_rank for gpu in set(gpus)]
    return all(by_rank) and len(set(used)) == len(used)


def _nccl_adds(tensor: Tensor) -> bool:
    known = (torch.int8, torch.uint8, torch.int32, torch.int64)
    is_number = tensor.dtype.is_floating_point or tensor.dtype in known
    return tensor.is_cuda and is_number


def _nccl_op(op: ReduceOp) -> Any:
    options: Any = distributed.AllreduceOptions()
    ops: Any = distributed.ReduceOp
    named = {ReduceOp.MIN: ops.MIN, ReduceOp.MAX: ops.MAX, ReduceOp.PROD: ops.PRODUCT}
    options.reduceOp = named.get(op, ops.SUM)
    return options
