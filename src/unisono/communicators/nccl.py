"""GPU tensors through NCCL, one GPU per rank; everything else through another communicator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, distributed

from unisono.communicators.communicator import Communicator, GraphEngine
from unisono.communicators.delegating import DelegatingCommunicator
from unisono.communicators.headers import Header, check_gathered
from unisono.communicators.nccl_group import ID_BYTES, NcclGroup, new_id
from unisono.communicators.stores import DEFAULT_TIMEOUT_SECONDS
from unisono.costs import Line
from unisono.errors import CommunicationError, UnsupportedError, WorkerTimeoutError
from unisono.kernels import divide, tree_reduce, undivided, wide_dtype
from unisono.options import ReduceOp

# A guess: ranks agree on the host, NCCL starts, and links of GPUs carry 100 GB/s.
_USUAL = Line(latency=1e-4, per_byte=1e-11)
_LOOK_SECONDS = 1.0
# How long a rank may be gone: NCCL may know it before the others know which one it is, and a rank
# that was ready sooner may have closed its communicator while this GPU is not.
_GRACE_SECONDS = 10.0


class NcclCommunicator(DelegatingCommunicator):
    """NCCL for GPU tensors, and `on_host` for host tensors and to agree on what is called.

    NCCL adds in its own order, so sums of floating point numbers may differ in the last bits
    from those of other communicators; they are the same on all ranks. Sums of half precision are
    rounded at every step. What NCCL has no number for goes through `on_host`.

    Every rank has one GPU here, the current one if `gpu` is not given; tensors on another one are
    copied there.
    """

    is_captured = False

    def __init__(
        self,
        on_host: Communicator,
        gpu: torch.device | None = None,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        if not (torch.cuda.is_available() and distributed.is_nccl_available()):
            raise UnsupportedError(
                f"NCCL needs a GPU and a torch that was built with it; torch {torch.__version__} "
                f"sees {torch.cuda.device_count()} GPUs. Use the implementation AUTO or RING."
            )
        super().__init__(on_host)
        self.name = f"NCCL for GPU tensors, {on_host.name} for others"
        self.cost = _USUAL
        self.timeout_seconds = self._timeout_seconds = timeout_seconds
        self._gpu = gpu or torch.device("cuda", torch.cuda.current_device())
        self._sequence = 0
        self._group: NcclGroup | None = None
        self._is_closed = self._has_failed = False
        # Until when this rank waits, for what, and when it looks after the others next.
        self._waits_for: object = "nothing"
        self._deadline = self._next_look = 0.0
        self._first_sign: float | None = None

    @property
    def graph_engine(self) -> GraphEngine | None:
        return self

    def keeps_order(self, tensor: Tensor) -> bool:
        return not _nccl_adds(tensor)

    def all_reduce(self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None) -> None:
        if not _nccl_adds(terms[0]):
            return self._carrier.all_reduce(op, terms, count)
        header = Header.of_terms("all_reduce", self._sequence + 1, op, terms, count)
        self._agree(header)
        total = self._sum_of_own(op, terms)
        self._run(header, lambda group: group.all_reduce(op, [total], [total]))
        if op is ReduceOp.MEAN:
            total = divide(total, count or self.size * len(terms), total.dtype)
        terms[0].detach().copy_(total)
        return None

    # Through the sum of all parts.
    reduce_scatter = Communicator.reduce_scatter

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

    def agree(self, what: str) -> None:
        """Raises an `UnequalCollectivesError` on all ranks unless they say the same."""
        self._agree(Header(what, 0))

    def check_usable(self, what: object) -> None:
        """Raises a `CommunicationError` if this was closed, or stopped by an error."""
        if self._is_closed or self._has_failed:
            why = "on a closed communicator" if self._is_closed else "after NCCL had been stopped"
            raise CommunicationError(f"{what} was called {why}. Make a new one with all ranks.")

    def settle(self, what: object) -> None:
        """Waits for the GPU, with an eye on the other ranks: NCCL may never notice a loss."""
        done = torch.cuda.Event()
        with torch.cuda.device(self._gpu):
            done.record()
            self._begin_waiting(what)
            try:
                while not done.query():
                    self._look()
            except BaseException:
                # Or the GPU would wait on, and everything that waits for the GPU.
                self._has_failed = True
                if self._group is not None:
                    self._group.abort()
                raise

    def set_timeout(self, seconds: float) -> None:
        self._timeout_seconds = seconds
        self._carrier.set_timeout(seconds)

    def close(self) -> None:
        self._is_closed = True
        if self._group is not None:
            self._group.close()
        self._carrier.close()

    def _agree(self, header: Header) -> list[Header]:
        """Returns the headers of all ranks: NCCL must not begin where they differ."""
        self.check_usable(header)
        self._sequence += 1
        return check_gathered(header, self._carrier.all_gather(header.as_tensor()))

    def _broadcast(self, header: Header, tensor: Tensor, root: int) -> None:
        data = tensor.view(-1).view(torch.uint8)
        here = data.to(self._gpu)
        self._run(header, lambda group: group.broadcast(here, root))
        if here is not data:
            data.copy_(here)

    def _run(self, header: Header, begin: Callable[[NcclGroup], None]) -> None:
        self._begin_waiting(header)
        with torch.cuda.device(self._gpu):
            if torch.cuda.is_current_stream_capturing() and not self.is_captured:
                raise UnsupportedError(
                    f"{header} was called while a CUDA graph was captured, whose replays would not "
                    "notice a lost worker. Let `unisono.function` capture the step."
                )
            begin(self._connected())
            if not self.is_captured:
                self.settle(header)

    def _connected(self) -> NcclGroup:
        """Returns what connects the GPUs. All ranks come here first in the same collective."""
        if self._group is None:
            name = torch.zeros(ID_BYTES, dtype=torch.uint8)
            if self.rank == 0:
                name = torch.frombuffer(bytearray(new_id()), dtype=torch.uint8)
            self._carrier.broadcast(name)
            self._group = NcclGroup(
                [self._gpu.index],
                name.numpy().tobytes(),
                first=self.rank,
                size=self.size,
                look=self._look,
            )
        return self._group

    def _begin_waiting(self, what: object) -> None:
        self._waits_for = what
        now = time.monotonic()
        self._deadline, self._next_look = now + self._timeout_seconds, now + _LOOK_SECONDS
        self._first_sign = None

    def _look(self) -> None:
        """Gives way to others while this rank waits; raises if it is to wait no longer."""
        time.sleep(0)
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        if now > self._deadline:
            raise WorkerTimeoutError(
                f"Rank {self.rank} waited {self._timeout_seconds:g} s for NCCL in "
                f"{self._waits_for}. Check the GPUs and the network, or raise `timeout_seconds` if "
                "they are slow."
            )
        try:
            # It knows which rank is lost, and NCCL does not.
            self._carrier.check_health()
            if self._group is not None:
                self._group.check()
        except CommunicationError:
            self._first_sign = self._first_sign or now
            if now > self._first_sign + _GRACE_SECONDS:
                raise

    def _sum_of_own(self, op: ReduceOp, terms: Sequence[Tensor]) -> Tensor:
        here = [term.detach().to(self._gpu) for term in terms]
        own = here[0].clone() if len(terms) == 1 else tree_reduce(undivided(op), here)
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
