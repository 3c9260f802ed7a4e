"""The workers of a strategy as torch's own hooks know them: a process group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import Work

from unisono.communicators import Communicator, own_op
from unisono.errors import UnsupportedError
from unisono.options import ReduceOp


class WorkersGroup(distributed.ProcessGroup):
    """A process group whose collectives the communicator of a strategy carries.

    So they have its order of sums, its deadlines and its errors, over shared memory too.
    `torch.distributed.all_reduce` and `all_gather` take it as `group`; it is not registered with
    torch, so what asks torch for the number of a rank does not know it.

    Args:
        communicator: Connects the workers.
    """

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator.rank, communicator.size)  # type: ignore[call-arg]
        self.communicator = communicator

    def allreduce(  # type: ignore[override]
        self, tensors: Any, opts: Any = distributed.ReduceOp.SUM
    ) -> Work:
        """Reduces one tensor in place. It is done when this returns."""
        tensor = _only(tensors)
        op = _op(getattr(opts, "reduceOp", opts))
        sent = self._placed(tensor)
        self.communicator.all_reduce(op, [sent])
        if sent is not tensor:
            tensor.copy_(sent)
        return _Done([tensor])

    def allgather(self, output_tensors: Any, input_tensors: Any, opts: Any = None) -> Work:
        """Gathers one tensor of each worker. It is done when this returns."""
        (rooms,) = output_tensors
        gathered = self.communicator.all_gather(self._placed(_only(input_tensors)))
        for room, one in zip(rooms, gathered, strict=True):
            room.copy_(one)
        return _Done(rooms)

    def _placed(self, tensor: Tensor) -> Tensor:
        place = tensor.device if self.communicator.takes(tensor.device) else torch.device("cpu")
        return tensor.detach().to(place).contiguous()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(worker {self.rank()} of {self.size()})"


class _Done(Work):
    """A collective that has ended."""

    def __init__(self, result: list[Tensor]) -> None:
        super().__init__()
        devices: Any = [result[0].device] if result[0].is_cuda else None
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


def _op(op: Any) -> ReduceOp:
    own = own_op(op)
    if own is None:
        raise UnsupportedError(
            f"Workers reduce with SUM, AVG, MIN, MAX or PRODUCT, got {getattr(op, 'op', op)}."
        )
    return own


def _only(tensors: Any) -> Tensor:
    if isinstance(tensors, Tensor):
        return tensors
    if len(tensors) != 1:
        raise UnsupportedError(
            f"A collective takes one tensor per worker, got {len(tensors)}. Call it once per "
            "tensor."
        )
    tensor: Tensor = tensors[0]
    return tensor
