"""The replicas of a worker: how they run, and how their gradients are reduced."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from unisono.arguments import check_bool, check_instance, check_optional
from unisono.contexts import CrossReplicaContext, entered, running_replica, runs_once
from unisono.devices import Device, replica_devices, this_machine
from unisono.engines import ThreadState
from unisono.errors import ContextError
from unisono.gradients import GradientReducer, Reduction
from unisono.modules import Leaves, Mirrors, merge, watch_torch
from unisono.modules.leaves import hide_cleared
from unisono.options import DEFAULT_OPTIONS, CommunicationOptions, ReduceOp, check_options
from unisono.reductions import CrossDeviceOps, Prices, Workers, predicted_cost
from unisono.strategies.counting import Counting
from unisono.strategies.runner import Capturable, Runner, Step
from unisono.tracing import span

if TYPE_CHECKING:
    from unisono.hooks import WorkersGroup
    from unisono.hooks.hook import HookFunction
    from unisono.strategies.strategy import Strategy
    from unisono.workers.elastic import ElasticJob
    from unisono.workers.replica_hooks import Hook


class WorkerReplicas:
    """The replicas of one worker. `StrategyExtended` adds the methods of `tf.distribute`."""

    # What makes runs that survive the loss of workers; None if nothing does.
    elastic: ElasticJob | None = None
    reduce_to: Callable[..., Any]

    def __init__(
        self,
        devices: tuple[Device, ...],
        cross_device_ops: CrossDeviceOps,
        *,
        reduce_gradients: ReduceOp = ReduceOp.MEAN,
        options: CommunicationOptions = DEFAULT_OPTIONS,
        is_serial: bool = False,
        synchronize_batch_norm: bool = False,
        workers: Workers | None = None,
        threads_per_replica: int | None = None,
        tuning: Prices | None = None,
    ) -> None:
        devices = replica_devices(devices)
        check_instance("cross_device_ops", cross_device_ops, CrossDeviceOps, "a `CrossDeviceOps`")
        reduce_gradients = ReduceOp.read(reduce_gradients, "reduce_gradients")
        options = check_options(options)
        check_bool("is_serial", is_serial)
        check_bool("synchronize_batch_norm", synchronize_batch_norm)
        check_optional("workers", workers, Workers, "`Workers` or None")
        check_optional("tuning", tuning, Prices, "a `Tuning` or None")
        self.workers = workers or Workers()
        self.reduce_gradients = reduce_gradients
        self.options = options
        self._is_serial = is_serial
        self.threads_per_replica = threads_per_replica
        self._tuning = tuning
        self._given_ops = cross_device_ops
        self.mirrors = Mirrors(
            *memories_of(devices),
            workers=self.workers,
            synchronize_batch_norm=synchronize_batch_norm,
        )
        # What gradients pass through on their way between workers, if the program has said so.
        self.hook: Hook | None = None
        self._lay_out(devices, cross_device_ops)
        # A single replica, too, has its gradients pass through a reduction that wants all of them.
        self.mirrors.is_single &= not self.local_ops.wants_all_gradients
        if not self.mirrors.is_single:
            watch_torch()
        self._num_runs = 0
        # A single replica shares nothing, and runs on the thread of its caller.
        self._run_lock: AbstractContextManager[Any] = (
            nullcontext() if self.mirrors.is_single else threading.Lock()
        )
        self._strategy: Strategy | None = None
        # It belongs to the process that made it, also after a fork; see `check_process`.
        self._process = os.getpid()

    def _lay_out(self, devices: tuple[Device, ...], ops: CrossDeviceOps) -> None:
        """Makes all that depends on which replicas this worker has, and who the others are."""
        self._devices = devices
        # Which replicas each worker has.
        self.layout = self.workers.layout(len(devices))
        self.local_ops = ops.in_strategy()
        self.cross_device_ops = self.workers.across(self.local_ops, devices)
        self.gradients = self._reducer()
        self._runner = self._new_runner()
        self.current_weights = [1.0] * len(devices)
        is_moving = self.elastic is not None
        self.counting = Counting(devices, self.workers, is_moving=is_moving)
        # What captures steps, if one can be captured.
        self._captures: Any = None

    def _new_runner(self) -> Runner:
        return Runner(
            self._devices, self.workers, self.threads_per_replica, is_serial=self._is_serial
        )

    def _reducer(self) -> GradientReducer:
        ops, devices = self.local_ops, self._devices
        reduction = Reduction(ops, self.reduce_gradients, self.options, devices)
        cost = predicted_cost(ops, devices, self._tuning)
        exchange = (self.workers.exchange if self.hook is None else _hooking().exchange_of)(self)
        return GradientReducer(self.mirrors, reduction, cost, exchange)

    def bind(self, strategy: Strategy) -> None:
        """Says whose extension this is."""
        self._strategy = strategy

    @property
    def strategy(self) -> Strategy:
        """The strategy that this extends."""
        assert self._strategy is not None
        return self._strategy

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        """The devices that replicas run on, by replica id."""
        return self._devices

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas over which gradients are aggregated, on all workers."""
        return self.layout.total

    @property
    def first_replica_id(self) -> int:
        """The number of this worker's first replica among those of all workers."""
        return self.layout.own.start

    @property
    def host(self) -> Device:
        """Where results go that are for the program: the first replica's device."""
        return self._devices[0]

    def adopt(self, leaves: Leaves) -> None:
        """Trains what belongs to no module, from now on: in the current run too, if there is one.

        It is made in a meeting of the replicas, so that none is in a backward pass.
        """
        self.mirrors.add(leaves)
        if running_replica() is not None:
            self.gradients.begin(self.current_weights)

    def _call(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        running = running_replica()
        if running is not None:
            if runs_once():
                raise ContextError(
                    "`run()` was called in `unisono.once(fn)`, after which the replicas get the "
                    "modules of the program again, and lose what this run writes to their own. "
                    "Call it outside the step, or in a `merge_call`."
                )
            results = self._runner.run_again(running, Step(fn, args, kwargs))
            return self.counting.regrouped(results)
        # One run at a time: leaves, gradients and weights are those of the run under way.
        with self._run_lock:
            before = ThreadState()
            try:
                with entered(CrossReplicaContext(self)):
                    return self._make_run(fn, args, kwargs)
            except BaseException:
                before.restore()
                raise

    def _make_run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self._run_step(fn, args, kwargs)

    def _run_step(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self._num_runs += 1
        with span("step", "run", step=self._num_runs):
            weights = self.counting.begin((*args, *kwargs.values()), self.reduce_gradients)
            self.current_weights = weights
            if not isinstance(fn, Capturable):
                return self.run_eagerly(fn, args, kwargs, weights)
            if self.elastic is not None:
                return self.run_eagerly(fn.fn, args, kwargs, weights)
            if self._captures is None:
                self._captures = fn.captures(self, self._runner)
            return self._captures.run(fn, args, kwargs, weights)

    def run_eagerly(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        weights: Sequence[float],
        recorder: Any = None,
    ) -> Any:
        """Runs a step on all replicas, and returns what they return."""
        step = Step(fn, args, kwargs)
        if recorder is None and self.mirrors.is_single and self.mirrors.generation == 0:
            # No leaf, and nothing to bring to other replicas.
            return self.counting.regrouped((self._runner.run_single(self, step),))
        if recorder is None or not (recorder.is_capturing and recorder.streams):
            # No graph of one memory can bring something to others.
            self.mirrors.refresh()
        self.gradients.begin(weights, () if recorder is None else recorder.streams)
        run = functools.partial(self._runner.run, self, step, weights, recorder)
        if self.mirrors.is_single:
            results = run() if recorder is None else self.mirrors.call_in_use(fn, run)
            return self.counting.regrouped(results)
        idle = [i for i, weight in enumerate(weights) if weight == 0.0]
        try:
            with _undone(self.mirrors, idle) if idle else nullcontext():
                results = self.mirrors.call_in_use(fn, run)
            self.mirrors.watch.check()
            self.mirrors.watch.check_parts()
            self.mirrors.groups.settle(len(self._devices), recorder)
            hide_cleared(self.mirrors.all_leaves)
        finally:
            self.mirrors.groups.forget()
            self.mirrors.watch.states = {}
        # Only where all replicas have succeeded: a run that fails leaves all as it was.
        self.mirrors.buffers.end(weights, recorder)
        self.mirrors.metrics.end(weights)
        return self.counting.regrouped(results)

    def replaying(self, weights: Sequence[float]) -> AbstractContextManager[None]:
        """In the block, a step is replayed, in which replicas have these weights."""
        self.gradients.weighting.weights = weights
        return self._runner.replaying()

    merge_call = staticmethod(merge)

    @functools.cached_property
    def process_group(self) -> WorkersGroup:
        """The workers as a process group of torch."""
        return _hooking().group_of(self)  # type: ignore[no-any-return]

    def register_comm_hook(self, state: object, hook: HookFunction) -> None:
        """Lets `hook` reduce gradients; see `Strategy.register_comm_hook`."""
        self.hook = _hooking().made(self, state, hook)
        self.gradients = self._reducer()
        watch_torch()
        # A single replica, too, has its gradients pass through the hook.
        self.mirrors.is_single = False
        self.mirrors.is_in_use = True
        self._run_lock = threading.Lock()

    def check_process(self) -> None:
        """In a forked child: lets new threads start, or refuses to speak for this worker.

        Raises:
            ContextError: If there are other workers, which know the parent only.
        """
        if self._process == os.getpid():
            return
        if self.workers.are_many:
            raise ContextError(
                f"{self.strategy!r} was made by process {self._process}, but this is process "
                f"{os.getpid()}, which was forked from it. A forked process is not a worker of the "
                "cluster. Use the strategy in the process that made it, or start processes with "
                "`spawn`."
            )
        self._process = os.getpid()
        self.mirrors.fronts.take_down_in_child()
        self._runner.threads.abandon()
        self._runner = self._new_runner()
        if not self.mirrors.is_single:
            # A thread of the parent may have held it.
            self._run_lock = threading.Lock()

    def close(self) -> None:
        """Ends the threads of the replicas, and leaves the other workers."""
        if self._process != os.getpid() and self.workers.are_many:
            return
        if self.hook is not None:
            # No checkpoint holds what it keeps any more.
            _hooking().hooks.discard(self.hook)
        # Graphs may hold work of the workers, who end what threads may wait for.
        if self._captures is not None:
            self._captures.close()
        self.workers.close()
        self.gradients.close()
        self._runner.threads.close()
        self.cross_device_ops.close()


def _hooking() -> ModuleType:
    """Returns what knows communication hooks, which few programs need."""
    from unisono.workers import hooking

    return hooking


def _undone(mirrors: Mirrors, idle: Sequence[int]) -> AbstractContextManager[None]:
    """In the block, what replicas without samples do is undone. Few runs have such replicas."""
    from unisono.modules.snapshot import undone

    return undone(mirrors, idle)


def memories_of(
    devices: tuple[Device, ...],
) -> tuple[tuple[Hashable, ...], tuple[torch.device, ...]]:
    """Returns the memory, and torch's name, of each device."""
    machine = this_machine()
    memories = tuple(machine.memory(device) for device in devices)
    return memories, tuple(machine.torch_device(device) for device in devices)
