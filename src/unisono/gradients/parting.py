"""Which parameters are in one pack: neighbors of a dtype, up to a size that is best for all."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.costs import Line, best_bytes_per_pack
from unisono.gradients.packs import LocalPack, Pack, Reduction, SparsePack, grouped
from unisono.gradients.replica_hooks import ReplicaHooks
from unisono.gradients.worker_packs import HookedPack, WorkerPack
from unisono.hooks.hook import CommHook
from unisono.packing import Spec, by_dtype
from unisono.reductions import AcrossWorkers
from unisono.variables import Leaves, Mirrors


class Parting:
    """Parts the parameters of one strategy into packs."""

    def __init__(
        self,
        mirrors: Mirrors,
        reduction: Reduction,
        cost: Line | None,
        hook: CommHook | ReplicaHooks | None,
    ) -> None:
        self._mirrors = mirrors
        self._reduction = reduction
        self._across = reduction.ops if isinstance(reduction.ops, AcrossWorkers) else None
        if self._across is not None and hook is None:
            # What a hook makes of a pack may depend on the pack, and costs something else.
            cost = self._across.communicator.cost
        self._cost = cost
        self._hook = hook

    def packs(self, trained: Sequence[Leaves]) -> tuple[list[Pack], list[Pack]]:
        """Returns packs of parameters, and those for single parameters with sparse gradients."""
        if self._across is None:
            wants_all = self._reduction.ops.wants_all_gradients
            groups = [trained] if wants_all else grouped(trained, self._bytes_per_pack(trained))
            return [LocalPack(group, self._reduction) for group in groups if group], []
        # What has sparse gradients comes last, each on its own.
        sparse = [one for one in trained if self._mirrors.is_sparse(one)]
        dense = [one for one in trained if not self._mirrors.is_sparse(one)]
        limit = self._bytes_per_pack(dense)
        alike = by_dtype([Spec.of(one.primary) for one in dense], range(len(dense)))
        groups = [group for own in alike for group in grouped([dense[i] for i in own], limit)]
        packs = [self._worker_pack(self._across, groups, i) for i in range(len(groups))]
        return packs, [SparsePack(one, self._reduction) for one in sparse]

    def _bytes_per_pack(self, owners: Sequence[Leaves]) -> int:
        """Returns the size of packs: what the user says, or what is best for these gradients."""
        total = sum(one.primary.nbytes for one in owners)
        return self._reduction.options.bytes_per_pack or best_bytes_per_pack(self._cost, total)

    def _worker_pack(
        self, across: AcrossWorkers, groups: Sequence[Sequence[Leaves]], number: int
    ) -> Pack:
        given = groups[number], across, self._reduction.op
        if self._hook is None:
            return WorkerPack(*given)
        is_last = number + 1 == len(groups)
        return HookedPack(*given, self._hook, index=number, is_last=is_last)
