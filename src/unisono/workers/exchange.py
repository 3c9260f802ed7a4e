"""How gradients travel between workers: in packs of one dtype, of a size that is best for all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from unisono.gradients.packs import Exchange, Pack, Reduction, SparsePack, best_limit, grouped
from unisono.modules import Leaves, Mirrors, raw
from unisono.options import CommunicationOptions, ReduceOp
from unisono.packing import Spec, by_dtype
from unisono.workers.across import AcrossWorkers
from unisono.workers.packs import HookedPack, WorkerPack
from unisono.workers.replica_hooks import Hook, ReplicaHooks


class WorkerExchange(Exchange):
    """Exchanges gradients with other workers, or passes them through a hook."""

    def __init__(
        self,
        mirrors: Mirrors,
        across: AcrossWorkers,
        op: ReduceOp,
        options: CommunicationOptions,
        hook: Hook | None = None,
    ) -> None:
        self.reduction = Reduction(across, op, options, across.devices)
        self.is_hooked = hook is not None
        self._mirrors = mirrors
        self._across = across
        self._hook = hook
        # What a hook makes of a pack may depend on the pack, and costs something else.
        self._cost = None if hook is not None else across.communicator.cost

    def packs(self, trained: Sequence[Leaves]) -> tuple[list[Pack], list[Pack]]:
        # What has sparse gradients comes last, each on its own.
        modules = map(raw, self._mirrors.primaries())
        tables = (one["_parameters"].values() for one in modules if one.get("sparse", False))
        known = set(map(id, itertools.chain.from_iterable(tables)))
        sparse = [one for one in trained if id(one.primary) in known]
        dense = [one for one in trained if id(one.primary) not in known]
        limit = self.reduction.options.bytes_per_pack or best_limit(dense, self._cost)
        alike = by_dtype([Spec.of(one.primary) for one in dense], range(len(dense)))
        groups = [group for own in alike for group in grouped([dense[i] for i in own], limit)]
        packs = [self._pack(groups, number) for number in range(len(groups))]
        return packs, [SparsePack(one, self.reduction) for one in sparse]

    def _pack(self, groups: Sequence[Sequence[Leaves]], number: int) -> Pack:
        given = groups[number], self.reduction, self._across
        if self._hook is None:
            return WorkerPack(*given)
        is_last = number + 1 == len(groups)
        return HookedPack(*given, self._hook, index=number, is_last=is_last)

    def combine(self, values: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        if self._hook is None:
            return self._across.combine_gradients(self.reduction.op, values)
        # A hook is given the mean of its worker.
        totals = self._across.combine_gradients(ReduceOp.SUM, values)
        return [total / len(self._across.devices) for total in totals]

    def interrupt(self) -> None:
        self._across.communicator.close()

    def close(self) -> None:
        if isinstance(self._hook, ReplicaHooks):
            self._hook.close()
