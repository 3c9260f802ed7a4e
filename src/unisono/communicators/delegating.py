"""Communicators that stand before another one: their base, and those that copy or record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from unisono.communicators.communicator import Communicator, GraphEngine
from unisono.options import ReduceOp
from unisono.tracing import span

P = ParamSpec("P")
T = TypeVar("T")


def _collective(name: str) -> Callable[..., Any]:
    def collective(self: DelegatingCommunicator, *args: Any, **options: Any) -> Any:
        return self._call(getattr(self._carrier, name), *args, **options)

    # As which a trace records it.
    collective.__name__, collective.__doc__ = name, getattr(Communicator, name).__doc__
    return collective


def _other(name: str) -> Callable[..., Any]:
    def other(self: DelegatingCommunicator, *args: Any) -> Any:
        return getattr(self._carrier, name)(*args)

    other.__doc__ = getattr(Communicator, name).__doc__
    return other


class DelegatingCommunicator(Communicator):
    """Lets another communicator do everything. Subclasses override what they do themselves.

    What a hierarchy asks of the communicator inside a host (`reduce_parts`, `share_parts` and
    `lead`) is not passed on: one like this never is inside of one.
    """

    def __init__(self, carrier: Communicator) -> None:
        super().__init__(carrier.rank, carrier.size)
        self.name = carrier.name
        self.cost = carrier.cost
        self.timeout_seconds = carrier.timeout_seconds
        self._carrier = carrier

    def _call(self, collective: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Makes a collective of the carrier. Subclasses may do something around it."""
        return collective(*args, **options)

    all_reduce = _collective("all_reduce")
    reduce_scatter = _collective("reduce_scatter")
    all_gather = _collective("all_gather")
    gather = _collective("gather")
    all_to_all = _collective("all_to_all")
    broadcast = _collective("broadcast")
    barrier = _collective("barrier")

    takes = _other("takes")
    keeps_order = _other("keeps_order")
    allocate = _other("allocate")
    set_timeout = _other("set_timeout")
    check_health = _other("check_health")
    close = _other("close")

    @property
    def graph_engine(self) -> GraphEngine | None:
        return self._carrier.graph_engine


class StagedCommunicator(DelegatingCommunicator):
    """Copies GPU tensors to pinned host memory, lets another communicator work, and copies back."""

    def __init__(self, carrier: Communicator) -> None:
        super().__init__(carrier)
        self.name = f"{carrier.name}, GPU tensors through host memory"

    def takes(self, device: torch.device) -> bool:
        return device.type == "cuda" or self._carrier.takes(device)

    def all_reduce(self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None) -> None:
        staged = [_staged(term) for term in terms]
        self._carrier.all_reduce(op, staged, count)
        _copy_back(staged[0], terms[0])

    def reduce_scatter(
        self, op: ReduceOp, terms: Sequence[Tensor], count: int | None = None
    ) -> Tensor:
        part = self._carrier.reduce_scatter(op, [_staged(term) for term in terms], count)
        return part.to(terms[0].device)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [one.to(tensor.device) for one in self._carrier.all_gather(_staged(tensor))]

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        gathered = self._carrier.gather(_staged(tensor), root)
        return None if gathered is None else [one.to(tensor.device) for one in gathered]

    def all_to_all(self, tensor: Tensor) -> list[Tensor]:
        return [one.to(tensor.device) for one in self._carrier.all_to_all(_staged(tensor))]

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        staged = _staged(tensor)
        self._carrier.broadcast(staged, root)
        _copy_back(staged, tensor)


def _staged(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    # A copy from the GPU into pinned memory need not pass through a buffer of the driver.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach())


def _copy_back(staged: Tensor, tensor: Tensor) -> None:
    if staged is not tensor:
        tensor.detach().copy_(staged)


class TracedCommunicator(DelegatingCommunicator):
    """Another communicator, whose collectives are recorded while somebody records."""

    def __init__(self, carrier: Communicator, group: int) -> None:
        super().__init__(carrier)
        self.group = group
        # Counted when nobody records too: workers may start to record at different times.
        self._number = 0

    def _call(self, collective: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        self._number += 1
        # What reduces is given how, and terms; everything else at most one tensor.
        given: tuple[Any, ...] = args
        op, tensors = given[:2] if given and isinstance(given[0], ReduceOp) else (None, given[:1])
        kind, number = collective.__name__, self._number
        with span("collective", kind, tensors, op=op, group=self.group, number=number):
            return collective(*args, **options)
