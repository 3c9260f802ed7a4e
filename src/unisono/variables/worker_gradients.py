"""Gradients are reduced between workers while the backward pass still runs.

All workers must exchange the same packs in the same order, whatever comes first on each of them. So
packs are sent in their order, each as soon as it and all before it are full; one that does not fill
is sent at the end. A thread of its own waits for the other workers meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor, nn

from unisono.devices import Device
from unisono.hooks.hook import CommHook
from unisono.options import CommunicationOptions, ReduceOp
from unisono.packing import group_by_bytes
from unisono.reductions import AcrossWorkers
from unisono.tracing import span
from unisono.values import DistributedValues, PerReplica
from unisono.variables.gradients import GradientReducer, Pass, gradients_of
from unisono.variables.hooked_packs import HookedPack
from unisono.variables.leaves import Leaves
from unisono.variables.mirrors import Mirrors
from unisono.variables.worker_packs import Pack, WorkerPack


class WorkerGradientReducer(GradientReducer):
    """Reduces the gradients of the leaves of one strategy over the replicas of all workers."""

    def __init__(
        self,
        mirrors: Mirrors,
        devices: tuple[Device, ...],
        ops: AcrossWorkers,
        reduce_op: ReduceOp,
        options: CommunicationOptions,
        hook: CommHook | None = None,
    ) -> None:
        # What a hook makes of a pack may depend on the pack, and costs something else.
        cost = ops.communicator.cost if hook is None else None
        super().__init__(mirrors, devices, ops, reduce_op, options, cost)
        self._across = ops
        self._hook = hook
        self._worker_packs: list[Pack] = []
        self._sending = threading.Lock()
        self._sent: dict[Pass, list[Future[None]]] = {}
        self._full: dict[Pass, set[int]] = {}
        self._sender: ThreadPoolExecutor | None = None

    def begin(self, weights: Sequence[float]) -> None:
        """Before a run: see `GradientReducer.begin`."""
        # What a pass that failed has sent must not meet what the next one sends.
        left = [future for sent in self._sent.values() for future in sent]
        self._sent.clear()
        self._full.clear()
        if left:
            self._settle(left)
        super().begin(weights)

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
        self._worker_packs = [self._make_pack(packs, number) for number in range(len(packs))]
        # What has sparse gradients comes last, each on its own.
        return packs + [[one] for one in trained if self._mirrors.is_sparse(one)]

    def _make_pack(self, packs: Sequence[Sequence[Leaves]], number: int) -> Pack:
        given = packs[number], self._across, self._op
        if self._hook is None:
            return WorkerPack(*given)
        is_last = number + 1 == len(packs)
        return HookedPack(*given, self._hook, index=number, is_last=is_last)

    def _pack_is_full(self, current: Pass, pack: int) -> None:
        # The last pack fills when the pass ends: then nothing is left to be done meanwhile.
        if pack + 1 >= len(self._worker_packs) or self._across.wants_all_gradients:
            return
        with self._sending:
            sent = self._sent.setdefault(current, [])
            full = self._full.setdefault(current, set())
            full.add(pack)
            while len(sent) in full:
                number = len(sent)
                self._fill(current, number)
                before = sent[-1] if sent else None
                sent.append(self._executor.submit(self._exchange, number, before))

    def _complete(self, current: Pass) -> Iterable[Leaves]:
        with self._sending:
            sent = self._sent.pop(current, [])
            self._full.pop(current, None)
        if sent:
            with span("reduce", "packs under way", packs=len(sent)):
                self._settle(sent)
            for future in sent:
                future.result()
        combined = self._combine_all(current)
        for number in range(len(sent), len(self._worker_packs)):
            self._fill(current, number, combined)
            self._exchange_rest(number)
        with span("copy", "give packs"):
            given = [one for pack in self._worker_packs for one in pack.give()]
        for (one,) in self._packs[len(self._worker_packs) :]:
            given += self._reduce_sparse(current, one)
        if self._op is not ReduceOp.MEAN:
            for pack in self._packs:
                for one in pack:
                    self._bring_back(one)
        return given

    def _settle(self, futures: Sequence[Future[None]]) -> None:
        """Waits until packs are exchanged, or have failed."""
        try:
            wait(futures)
        except KeyboardInterrupt:
            # Or the thread that sends would wait on, and the process could not end without it.
            self._across.communicator.close()
            raise

    def _exchange_rest(self, number: int) -> None:
        """Exchanges a pack after the backward pass, when nothing is left to be done meanwhile."""
        if self._hook is None:
            self._exchange(number)
        else:
            # A hook sees no replica: its random numbers, say, are those of the program.
            future = self._executor.submit(self._exchange, number)
            self._settle([future])
            future.result()

    def _combine_all(self, current: Pass) -> dict[Leaves, Tensor]:
        """Lets a reduction that wants all gradients at once combine those of this worker."""
        if not self._across.wants_all_gradients:
            return {}
        members = [one for pack in self._worker_packs for one in pack.members]
        self._set_aside_all(members)
        new = [one for one in members if one in current.arrived]
        # A hook is given the mean of its worker.
        op = self._op if self._hook is None else ReduceOp.SUM
        totals = self._across.combine_gradients(op, [gradients_of(one.leaves) for one in new])
        if self._hook is not None:
            totals = [total / len(self._devices) for total in totals]
        return dict(zip(new, totals, strict=True))

    def _fill(
        self, current: Pass, number: int, combined: dict[Leaves, Tensor] | None = None
    ) -> None:
        pack = self._worker_packs[number]
        with span("copy", "fill pack", (one.primary for one in pack.members), pack=number):
            self._set_aside_all(pack.members)
            pack.fill(current.arrived, combined)

    def _exchange(self, number: int, before: Future[None] | None = None) -> None:
        """Exchanges a pack. If the one before it failed, it does: the same do on all workers."""
        if before is not None:
            before.result()
        with span("reduce", "exchange pack", pack=number):
            self._worker_packs[number].exchange()

    def _kept(self, grad: Tensor) -> Tensor:
        return grad.clone()

    def _reduce_sparse(self, current: Pass, one: Leaves) -> list[Leaves]:
        """Reduces the sparse gradients of a parameter, of which a worker may have none."""
        self._set_aside_all([one])
        if one in current.arrived:
            grads = gradients_of(one.leaves)
        else:
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
