"""Gradients are reduced between workers while the backward pass still runs.

All workers must exchange the same packs in the same order, whatever comes first on each of them. So
packs are sent in their order, each as soon as it and all before it are full; one that does not fill
is sent at the end. A thread of its own waits for the other workers meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from unisono.devices import Device
from unisono.options import CommunicationOptions, ReduceOp
from unisono.packing import group_by_bytes
from unisono.reductions import AcrossWorkers
from unisono.tracing import span
from unisono.values import DistributedValues, PerReplica
from unisono.variables.gradients import GradientReducer, Pass, gradients_of
from unisono.variables.leaves import Leaves
from unisono.variables.mirrors import Mirrors
from unisono.variables.worker_packs import WorkerPack


class WorkerGradientReducer(GradientReducer):
    """Reduces the gradients of the leaves of one strategy over the replicas of all workers."""

    def __init__(
        self,
        mirrors: Mirrors,
        devices: tuple[Device, ...],
        ops: AcrossWorkers,
        reduce_op: ReduceOp,
        options: CommunicationOptions,
    ) -> None:
        super().__init__(mirrors, devices, ops, reduce_op, options, ops.communicator.cost)
        self._across = ops
        self._worker_packs: list[WorkerPack] = []
        self._sending = threading.Lock()
        self._sent: dict[Pass, list[Future[None]]] = {}
        self._full: set[int] = set()
        self._sender: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """Ends the thread that sends."""
        if self._sender is not None:
            self._sender.shutdown()
            self._sender = None

    def _group(self, leaves: Sequence[Leaves]) -> list[list[Leaves]]:
        trained = [one for one in leaves if one.primary.requires_grad]
        dense = [one for one in trained if not self._mirrors.is_sparse(one)]
        by_dtype: dict[torch.dtype, list[Leaves]] = {}
        for one in dense:
            by_dtype.setdefault(one.primary.dtype, []).append(one)
        limit = self._bytes_per_pack([one.primary.nbytes for one in dense])
        packs = [
            [members[i] for i in group]
            for members in by_dtype.values()
            for group in group_by_bytes([one.primary.nbytes for one in members], limit)
            if group
        ]
        self._worker_packs = [WorkerPack(pack, self._across, self._op) for pack in packs]
        # What has sparse gradients comes last, each on its own.
        return packs + [[one] for one in trained if self._mirrors.is_sparse(one)]

    def _pack_is_full(self, current: Pass, pack: int) -> None:
        # The last pack fills when the pass ends: then nothing is left to be done meanwhile.
        if pack + 1 >= len(self._worker_packs):
            return
        with self._sending:
            sent = self._sent.setdefault(current, [])
            self._full.add(pack)
            while len(sent) in self._full:
                number = len(sent)
                self._full.discard(number)
                self._fill(current, number)
                sent.append(self._executor.submit(self._exchange, number))

    def _complete(self, current: Pass) -> Iterable[Leaves]:
        with self._sending:
            sent = self._sent.pop(current, [])
            self._full.clear()
        try:
            with span("reduce", "packs under way", packs=len(sent)):
                for future in sent:
                    future.result()
        except KeyboardInterrupt:
            # Or the thread that sends would wait on, and the process could not end without it.
            self._across.communicator.close()
            raise
        for number in range(len(sent), len(self._worker_packs)):
            self._fill(current, number)
            self._exchange(number)
        with span("copy", "give packs"):
            given = [one for pack in self._worker_packs for one in pack.give()]
        for (one,) in self._packs[len(self._worker_packs) :]:
            given += self._reduce_sparse(current, one)
        if self._op is not ReduceOp.MEAN:
            for pack in self._packs:
                for one in pack:
                    self._bring_back(one)
        return given

    def _fill(self, current: Pass, number: int) -> None:
        pack = self._worker_packs[number]
        with span("copy", "fill pack", (one.primary for one in pack.members), pack=number):
            if self._op is not ReduceOp.MEAN:
                for one in pack.members:
                    if one not in current.arrived:
                        self._set_aside_all(one)
            pack.fill(current.arrived)

    def _exchange(self, number: int) -> None:
        with span("reduce", "exchange pack", pack=number):
            self._worker_packs[number].exchange()

    def _set_aside_all(self, one: Leaves) -> None:
        for leaf in one.leaves:
            self._set_aside(leaf)

    def _kept(self, grad: Tensor) -> Tensor:
        return grad.clone()

    def _reduce_sparse(self, current: Pass, one: Leaves) -> list[Leaves]:
        """Reduces the sparse gradients of a parameter, of which a worker may have none."""
        if one in current.arrived:
            grads = gradients_of(one.leaves)
        else:
            self._set_aside_all(one)
            grads = [_no_rows(leaf) for leaf in one.leaves]
        value = PerReplica.placed(tuple(grads), self._devices)
        result: Any = self._across.batch_reduce(self._op, [(value, value)], self._options)[0]
        parts = result.values if isinstance(result, DistributedValues) else (result,)
        if parts[0]._nnz() == 0:
            return []
        for leaf, part in zip(one.leaves, parts, strict=True):
            leaf.grad = part
        return [one]

    @property
    def _executor(self) -> ThreadPoolExecutor:
        if self._sender is None:
            self._sender = ThreadPoolExecutor(1, thread_name_prefix="unisono-exchange")
        return self._sender


def _no_rows(leaf: nn.Parameter) -> Tensor:
    """Returns a sparse gradient that is zero."""
    return torch.sparse_coo_tensor(
        torch.empty(1, 0, dtype=torch.int64),
        torch.empty(0, *leaf.shape[1:], dtype=leaf.dtype),
        leaf.shape,
        device=leaf.device,
        check_invariants=False,
    )
