"""Reduces gradients while the backward pass runs.

Parameters are put into packs in reverse order of creation, roughly the order of their gradients.
The replica that fills a pack last reduces it while the others go on. At the end of its backward
pass, each replica waits for the others, so after `backward()` every gradient is reduced.

Only one parameter per pack has a hook: the one whose gradient comes last. It checks whether the
pack is full. The last pack is full when the pass ends.

All workers exchange the packs in the same order. Each is sent as soon as it and all before it are
full, or at the end of the pass. A thread waits for the other workers meanwhile.

A parameter that was frozen when the run began is in no pack. If a step unfreezes it, it is reduced
when the pass ends, and is in a pack from the next run on, also where it is frozen again.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unisono.contexts import ReplicaContext, current_replica
from unisono.devices import lend
from unisono.gradients import accumulation
from unisono.gradients.packs import (
    Exchange,
    Pack,
    Reduction,
    SparsePack,
    gradients_of,
    local_packs,
    reduce_own,
    refuse_sparse,
)
from unisono.gradients.passes import OwnPass, Pass, Sender, watch_backward_passes
from unisono.modules import Leaves, Mark, Mirrors
from unisono.modules.leaves import needs_grad, show_gradients, with_own_gradients
from unisono.packing import Line
from unisono.torch_private import no_torch_function
from unisono.tracing import span


class GradientReducer:
    """Reduces the gradients of the leaves of one strategy, over the replicas of all workers.

    Args:
        reduction: How the gradients of the replicas of this worker become one.
        cost: What that costs, if it is known.
        exchange: Reduces them with those of other workers, or through a hook, instead.
    """

    def __init__(
        self,
        mirrors: Mirrors,
        reduction: Reduction,
        cost: Line | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self._mirrors = mirrors
        self._devices = reduction.devices
        self._cost = cost
        self._exchange = exchange
        # Whether gradients go to other workers, or through a hook.
        self.has_workers = exchange is not None
        self._reduction = reduction if exchange is None else exchange.reduction
        self._generation = -1
        self._packs: list[Pack] = []
        self._num_early = 0  # Packs that are reduced before the pass ends.
        # What is trained, and what is frozen: the parameters, and their leaves by replica.
        self._owners: list[Leaves] = []
        self._frozen: list[Leaves] = []
        self._leaves: list[list[nn.Parameter]] = []
        self._frozen_leaves: list[list[nn.Parameter]] = []
        # What steps have trained although it was frozen, and whether one has in this run.
        self._unfrozen: set[Leaves] = set()
        self._has_unfrozen = False
        # For each pack, the numbers of its members among `_owners`, and the one that is hooked.
        self._numbers: list[range] = []
        self._hooked_at: list[int] = []
        # Where the hook of a pack is to be instead, because gradients came after that one.
        self._moves: dict[int, int] = {}
        # The parameters whose hooks are to be called when their gradient is there.
        self._hooked: list[Leaves] = []
        self._removals: list[Callable[[], None]] = []
        self.weighting = accumulation.Weighting(reduction.op)
        self._aside = accumulation.Aside(reduction.op, is_copied=exchange is not None)
        # Whether a pass of this run added to gradients, and whether the last pass reduced none.
        self.has_added = self.has_unreduced = False
        # Whether gradients of passes in `no_sync` wait for the next pass that reduces.
        self._has_waiting = False
        # Whether a pass of this run has failed that other workers know a part of.
        self._has_left = False
        self._passes: dict[int, Pass] = {}
        self._lock = threading.Lock()
        self._sender = Sender(exchange.interrupt if exchange is not None else lambda: None)
        watch_backward_passes()
        rest = weakref.WeakMethod(self.reduce_rest)
        mirrors.reduce_rest = lambda owners: None if (reduce := rest()) is None else reduce(owners)

    def begin(self, weights: Sequence[float], streams: Sequence[torch.cuda.Stream] = ()) -> None:
        """Before a run: looks at the leaves that there are now, and what each replica counts."""
        # What a pass that failed has sent must not meet what the next one sends.
        left = [future for current in self._passes.values() for future in current.sent]
        self._passes.clear()
        self.has_added = self._has_left = False
        if left:
            self._sender.settle(left)
        self._track()
        self.weighting.begin(weights, [*self._owners, *self._frozen], streams)
        self._hooked = [
            one
            for one in self._owners
            if one.primary._post_accumulate_grad_hooks and accumulation.has_hooks(one.primary)
        ]

    def close(self) -> None:
        """Ends the thread that sends, if there is one, and forgets a pass that has failed."""
        self._sender.close()
        self._passes.clear()
        if self._exchange is not None:
            self._exchange.close()

    def retire(self) -> None:
        """Ends, and takes the hooks away: other replicas come, with another reducer."""
        self.close()
        for remove in (*self._removals, *self.weighting.removals):
            remove()

    def _track(self) -> None:
        if self._generation != self._mirrors.generation or self._has_unfrozen:
            for remove in self._removals:
                remove()
            self._moves.clear()
            self._make_packs()
            self._removals = []
            for one in (*self._owners, *self._frozen):
                for leaf in one.leaves:
                    accumulation.seal(leaf)
                self._removals += self._aside.hook(one)
            for pack in range(self._num_early):
                self._hook_pack(pack, self._hooked_at[pack])
            # Last, because Ctrl-C may come between.
            self._generation = self._mirrors.generation
        elif self._moves:
            moves, self._moves = self._moves, {}
            for pack, number in moves.items():
                self._hook_pack(pack, number)

    def _make_packs(self) -> None:
        owners = self._mirrors.all_leaves[::-1]
        self._unfrozen.intersection_update(owners)
        trained: list[Leaves] = []
        self._frozen = []
        for one in owners:
            is_trained = one.primary.requires_grad or one in self._unfrozen
            (trained if is_trained else self._frozen).append(one)
        self._has_unfrozen = False
        sparse: list[Pack] = []
        if self._exchange is None:
            self._packs = local_packs(trained, self._reduction, self._cost)
        else:
            self._packs, sparse = self._exchange.packs(trained)
        ends = itertools.accumulate((len(pack.members) for pack in self._packs), initial=0)
        self._numbers = list(itertools.starmap(range, itertools.pairwise(ends)))
        self._hooked_at = [numbers[-1] for numbers in self._numbers]
        # The last pack fills when the pass ends: then nothing is left to be done meanwhile.
        self._num_early = 0 if self._reduction.ops.wants_all_gradients else len(self._packs[:-1])
        self._packs += sparse
        self._owners = [one for pack in self._packs for one in pack.members]
        self._leaves, self._frozen_leaves = (
            [[one.leaves[i] for one in owners] for i in range(len(self._devices))]
            for owners in (self._owners, self._frozen)
        )

    def _hook_pack(self, pack: int, number: int) -> None:
        for leaf in self._owners[self._hooked_at[pack]].leaves:
            if isinstance(leaf._post_accumulate_grad_hooks, accumulation.SealedHooks):
                leaf._post_accumulate_grad_hooks.clear()
        self._hooked_at[pack] = number
        # Autograd's hooks are invisible to the garbage collector, so they hold weak references.
        reducer = weakref.ref(self)

        def after(_: Tensor) -> None:
            if (found := reducer()) is not None:
                found._look(pack)

        leaves = self._owners[number].leaves
        self._removals += [accumulation.SealedHooks.on(x, after).clear for x in leaves]

    def make_pass(self, context: ReplicaContext, run: Callable[[], Any]) -> Any:
        """Lets a replica make a backward pass, and reduces what it and the others bring."""
        notes = context.notes
        if notes.current_pass is not None:
            # Within another one: a checkpoint computes again.
            return run()
        if self._has_left:
            accumulation.refuse_to_go_on()
        if notes.is_without_sync and self._hooked:
            accumulation.refuse_to_wait(self._mirrors.name_of(self._hooked[0].primary))
        with no_torch_function():
            with self._lock:
                if notes.num_passes not in self._passes:
                    self._passes[notes.num_passes] = Pass(self._num_early, len(self._devices))
                current = self._passes[notes.num_passes]
            leaves = self._leaves[context.local_id]
            if True in map(needs_grad, frozen := self._frozen_leaves[context.local_id]):
                leaves = [*leaves, *frozen]
            own = OwnPass(leaves, current)
        notes.current_pass = own
        if own.adds:  # Never set back, because another replica may set it at the same time.
            self.has_added = True
        self.has_unreduced = notes.is_without_sync
        try:
            result = run()
        except Exception:
            self._leave(context, own)
            raise
        finally:
            notes.current_pass = None
        if notes.is_without_sync:
            self._keep(context, own)
        else:
            self._finish(context, own)
        return result

    def _keep(self, context: ReplicaContext, own: OwnPass, reduced: Collection[int] = ()) -> None:
        """Leaves the gradients of a pass, but for those `reduced`, to the next one."""
        self._has_waiting = True
        if context.gradient_weight != 1.0:
            for number in own.new():
                if number not in reduced:
                    self.weighting.note(own.leaves[number])

    def _leave(self, context: ReplicaContext, own: OwnPass) -> None:
        """A pass of a replica has failed, and its step may go on. No pack is reduced any more."""
        context.notes.num_passes += 1
        self._has_left = self._exchange is not None and self._num_early > 0
        with own.of_all.reducing:
            own.of_all.has_failed = True
        full = () if self._exchange is not None else own.of_all.full
        reduced = {number for pack in full for number in self._numbers[pack]}
        for number in reduced:
            self._owners[number].reduced[context.local_id] = Mark.of(own.leaves[number].grad)
        self._keep(context, own, reduced)

    def _look(self, pack: int) -> None:
        """The last gradient of a pack may have come. Runs on the thread of its replica."""
        context = current_replica()
        own = None if context is None else context.notes.current_pass
        if context is None or own is None or context.notes.is_without_sync:
            return
        if context.meeting.is_apart:
            # Python sends all packs between two graphs, so none leaves in the middle of one.
            return
        current = own.of_all
        orders_streams = context.meeting.orders_streams
        if orders_streams:
            current.trail.note(self._leaves[context.local_id][self._hooked_at[pack]].device)
        missing = own.missing(self._numbers[pack])
        if missing:
            self._moves[pack] = missing[-1]
        elif own.fills(pack):
            current.trail.follow()
            self._pack_is_full(current, pack)
            if orders_streams:
                for leaf in self._packs[pack].members[0].leaves:
                    current.trail.note(leaf.device)

    def _pack_is_full(self, current: Pass, number: int) -> None:
        """The last gradient of a pack has come: reduces it, or sends the next packs in order."""
        if self._exchange is None:
            with current.reducing:
                if not current.has_failed:
                    self._fill(number, self._packs[number].everything)
                    current.full.add(number)
            return
        with self._lock:
            current.full.add(number)
            while (following := len(current.sent)) in current.full:
                self._fill(following, self._packs[following].everything)
                exchange = functools.partial(self._send, following)
                self._sender.send_early(exchange, current, self._packs[following].captured_on())

    def _finish(self, context: ReplicaContext, own: OwnPass) -> None:
        """A replica's backward pass has ended: waits for the others, and reduces what is left."""
        current, replica_id, num_owners = own.of_all, context.local_id, len(self._owners)
        if context.meeting.orders_streams:
            for leaf in self._leaves[replica_id][:1]:
                current.trail.note(leaf.device)

        def work(given: list[list[int]]) -> list[None]:
            current.trail.follow()
            with no_torch_function():
                numbers = (
                    given[0] if given.count(given[0]) == len(given) else sorted(set().union(*given))
                )
                self._has_waiting = False
                split = bisect.bisect_left(numbers, num_owners)
                arrived = {self._owners[number] for number in numbers[:split]}
                reduced = self._complete(current, arrived)
                late = [self._frozen[number - num_owners] for number in numbers[split:]]
                if late:
                    self._has_unfrozen = True
                    self._unfrozen.update(late)
                    self._aside.put(late)
                    self._reduction.reduce(late)
                    self._aside.bring_back(late)
                show_gradients([*reduced, *late])
                hooked = self._hooked + [x for x in late if accumulation.has_hooks(x.primary)]
            if hooked:
                found = {*reduced, *late}
                accumulation.call_hooks(context, [one for one in hooked if one in found])
            return [None] * len(self._devices)

        if context.meeting.is_apart:
            recorder: Any = context.meeting.recorder
            refuse_sparse(recorder, self._leaves[replica_id], self._packs)
            if self._aside.kept:
                recorder.refuse("gradients of workers or GPUs are summed and added to earlier ones")
        number = context.notes.num_passes
        context.notes.num_passes += 1
        with no_torch_function():
            new = own.new()
            if self._has_waiting:
                # Also those that this pass has not added to.
                all_owners = enumerate((*self._owners, *self._frozen))
                waiting = (i for i, one in all_owners if one.is_own(replica_id))
                new = sorted({*new, *waiting})
        context.meeting.meet(replica_id, f"backward() number {number}", new, work)
        if current.trail.follow():
            lend(grad for leaf in self._leaves[replica_id] if (grad := leaf.grad) is not None)

    def _complete(self, current: Pass, arrived: Collection[Leaves]) -> list[Leaves]:
        """All backward passes have ended: reduces the rest, and returns what has a gradient."""
        if num_sent := len(current.sent):
            with span("reduce", "packs under way", packs=num_sent):
                self._sender.finish(current.sent)
        combined = self._combine_all(arrived)
        done = range(num_sent) if self._exchange is not None else current.full
        for number in range(len(self._packs)):
            if number not in done:
                self._fill(number, arrived, combined)
                is_dense = not isinstance(self._packs[number], SparsePack)
                if self._exchange is not None and self._exchange.is_hooked and is_dense:
                    # A hook sees no replica: its random numbers, say, are those of the program.
                    sent: list[Any] = []
                    self._sender.send(functools.partial(self._send, number), sent)
                    self._sender.finish(sent)
                elif self._exchange is not None:
                    self._send(number)
        with span("copy", "give packs"):
            given = [one for pack in self._packs for one in pack.give()]
        self._aside.bring_back(self._owners)
        return given

    def _fill(
        self, number: int, arrived: Collection[Leaves], combined: dict[Leaves, Tensor] | None = None
    ) -> None:
        pack = self._packs[number]
        kind, name = ("reduce", "pack") if self._exchange is None else ("copy", "fill pack")
        with span(kind, name, (one.primary for one in pack.members), pack=number):
            self._aside.put(pack.members)
            pack.fill(arrived, combined)

    def _send(self, number: int) -> None:
        with span("reduce", "exchange pack", pack=number):
            self._packs[number].exchange()

    def _combine_all(self, arrived: Collection[Leaves]) -> dict[Leaves, Tensor] | None:
        """Lets a reduction that wants all gradients at once combine those of this worker."""
        if self._exchange is None or not self._reduction.ops.wants_all_gradients:
            return None
        dense = [pack for pack in self._packs if not isinstance(pack, SparsePack)]
        members = [one for pack in dense for one in pack.members]
        self._aside.put(members)
        new = [one for one in members if one in arrived]
        totals = self._exchange.combine([gradients_of(one.leaves) for one in new])
        return dict(zip(new, totals, strict=True))

    def reduce_rest(self, owners: Iterable[Leaves]) -> None:
        """Before an update: reduces the gradients that replicas have written themselves.

        A backward pass has reduced the others, and later changes, such as clipping, are the same on
        all replicas.
        """
        if self._has_left:
            accumulation.refuse_to_go_on()
        own = with_own_gradients(owners)
        if own:
            with span("reduce", "gradients written by hand", (one.primary for one in own)):
                reduce_own(own, self._mirrors, self.weighting, self._reduction)
