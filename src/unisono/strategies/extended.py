"""`StrategyExtended`: what strategies are made of."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from unisono.arguments import check_bool, check_call, check_instance, check_optional
from unisono.communicators import Communicator, IdentityCommunicator
from unisono.contexts import (
    CrossReplicaContext,
    ReplicaContext,
    entered,
    running_replica,
)
from unisono.costs import Tuning
from unisono.devices import Device, replica_devices, this_machine
from unisono.engines import CallerThread
from unisono.functions import Captures, Function
from unisono.gradients import GradientReducer
from unisono.gradients.replica_hooks import ReplicaHooks
from unisono.hooks.hook import CommHook
from unisono.options import DEFAULT_OPTIONS, CommunicationOptions, ReduceOp, check_options
from unisono.reductions import (
    AcrossWorkers,
    CrossDeviceOps,
    Workers,
    predicted_cost,
)
from unisono.strategies.counting import Counting
from unisono.strategies.extended_methods import ExtendedMethods
from unisono.strategies.hooking import HookMethods
from unisono.strategies.runner import Runner, unpack
from unisono.tracing import span
from unisono.values import DistributedValues
from unisono.variables import (
    Leaves,
    Mirrors,
    merge,
    undone,
    watch_torch,
)

if TYPE_CHECKING:
    from unisono.strategies.elastic_job import ElasticJob
    from unisono.strategies.strategy import Strategy


class StrategyExtended(ExtendedMethods, HookMethods):
    """Further methods of a strategy of one worker.

    Args:
        devices: The device of each replica.
        cross_device_ops: What reduces between them.
        reduce_gradients: How the gradients of the replicas become one.
        options: Hints for all reductions.
        is_serial: Whether replicas run one after another.
        synchronize_batch_norm: Whether batch normalization is over the batches of all replicas.
        communicator: Connects this worker to the others; None if there are none.
        replicas_per_worker: How many replicas each worker has; None if all have the same number.
        threads_per_replica: How many threads torch may use inside an operator on each replica. None
            means that the replicas of a worker share its threads.
        tuning: What the links were measured to cost, the same on all workers; None if they were
            not.
    """

    experimental_require_static_shapes = False
    experimental_between_graph = False
    experimental_should_init = True
    should_checkpoint = True
    should_save_summary = True
    # What makes runs that survive the loss of workers; None if nothing does.
    elastic: ElasticJob | None = None

    def __init__(
        self,
        devices: tuple[Device, ...],
        cross_device_ops: CrossDeviceOps,
        *,
        reduce_gradients: ReduceOp = ReduceOp.MEAN,
        options: CommunicationOptions = DEFAULT_OPTIONS,
        is_serial: bool = False,
        synchronize_batch_norm: bool = False,
        communicator: Communicator | None = None,
        replicas_per_worker: Sequence[int] | None = None,
        threads_per_replica: int | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        devices = replica_devices(devices)
        check_instance("cross_device_ops", cross_device_ops, CrossDeviceOps, "a `CrossDeviceOps`")
        reduce_gradients = ReduceOp.read(reduce_gradients, "reduce_gradients")
        options = check_options(options)
        check_bool("is_serial", is_serial)
        check_bool("synchronize_batch_norm", synchronize_batch_norm)
        check_optional("communicator", communicator, Communicator, "a `Communicator` or None")
        check_optional("tuning", tuning, Tuning, "a `Tuning` or None")
        self._duplicate = functools.partial(
            StrategyExtended,
            devices,
            cross_device_ops,
            reduce_gradients=reduce_gradients,
            options=options,
            is_serial=is_serial,
            synchronize_batch_norm=synchronize_batch_norm,
            threads_per_replica=threads_per_replica,
            tuning=tuning,
        )
        self.workers = Workers(communicator or IdentityCommunicator(), replicas_per_worker)
        self.reduce_gradients = reduce_gradients
        self.options = options
        self._is_serial = is_serial
        self._num_intraop = threads_per_replica
        self._tuning = tuning
        self.mirrors = Mirrors(
            *_memories(devices),
            workers=self.workers,
            synchronize_batch_norm=synchronize_batch_norm,
        )
        # What gradients pass through on their way between workers, if the program has said so.
        self._hook: CommHook | ReplicaHooks | None = None
        self._lay_out(devices, cross_device_ops)
        # A single replica, too, has its gradients pass through a reduction that wants all of them.
        self.mirrors.is_single &= not self._local_ops.wants_all_gradients
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
        self.cross_device_ops = self._local_ops = ops = ops.in_strategy()
        if self.workers.are_many:
            self.cross_device_ops = AcrossWorkers(ops, self.workers, devices)
        self.gradients = self._reducer()
        self._runner = Runner(
            devices, self.workers, is_serial=self._is_serial, num_intraop=self._num_intraop
        )
        self.current_weights = [1.0] * len(devices)
        is_moving = self.elastic is not None
        self.counting = Counting(devices, self.workers, is_moving=is_moving)
        places = _memories(devices)[1]
        self._captures = Captures(places, self.mirrors, self._runner.generators, self._run)

    def _reducer(self) -> GradientReducer:
        """Makes what reduces gradients."""
        ops, hook, cost = self.cross_device_ops, self._hook, None
        if hook is None:
            cost = predicted_cost(self._local_ops, self._devices, self._tuning)
        else:
            # A single worker, too, has its gradients pass through the hook.
            ops = across = AcrossWorkers(self._local_ops, self.workers, self._devices)
            if isinstance(hook, ReplicaHooks):
                hook.lay_out(across, self.mirrors.places[0])
        return GradientReducer(
            self.mirrors, self._devices, ops, self.reduce_gradients, self.options, cost, hook
        )

    def _relayout(
        self,
        devices: tuple[Device, ...],
        ops: CrossDeviceOps,
        communicator: Communicator,
        counts: Sequence[int],
    ) -> None:
        """Between two runs: gives this worker other replicas, and keeps what the program made."""
        if self.elastic is not None:
            self.elastic.variables.check(has_unreduced=self.gradients.has_unreduced)
        self.mirrors.relayout(*_memories(devices))
        self.gradients.retire()
        self._captures.close()
        self._runner.close()
        self.workers.change(communicator, counts)
        self._lay_out(devices, ops)
        if self.elastic is not None:
            self.elastic.variables.relayout()

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
    def parameter_devices(self) -> tuple[Device, ...]:
        """The devices that variables are kept on."""
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

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls `fn(*args, **kwargs)` on every replica; see `Strategy.run`.

        If `args` is one distributed value, each replica unpacks its own component, as TensorFlow
        does: a tensor, along its first dimension.
        """
        self.strategy._check_cross_replica("call_for_each_replica()")
        is_unpacked = isinstance(args, DistributedValues)
        check_call("fn", fn, () if is_unpacked else args, kwargs)
        if is_unpacked:
            fn, args = functools.partial(unpack, fn), (args,)
        kwargs = kwargs or {}
        running = running_replica()
        if running is not None:
            results = self._runner.run_again(running, fn, args, kwargs)
            return self.counting.regrouped(results)
        # One run at a time: leaves, gradients and weights are those of the run under way.
        with self._run_lock:
            before = CallerThread()
            try:
                with entered(CrossReplicaContext(self)):
                    if self.elastic is not None:
                        return self.elastic.run(fn, args, kwargs)
                    return self._run_step(fn, args, kwargs)
            except BaseException:
                before.restore()
                raise

    def _run_step(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self._num_runs += 1
        with span("step", "run", step=self._num_runs):
            weights = self.counting.begin((*args, *kwargs.values()), self.reduce_gradients)
            self.current_weights = weights
            if isinstance(fn, Function):
                if self.elastic is not None:
                    return self._run(fn.fn, args, kwargs, weights)
                return self._captures.run(fn, args, kwargs, weights)
            return self._run(fn, args, kwargs, weights)

    def _run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        weights: Sequence[float],
        recorder: Any = None,
    ) -> Any:
        if recorder is None or not (recorder.is_capturing and recorder.streams):
            # No graph of one memory can bring something to others.
            self.mirrors.refresh()
        self.gradients.begin(weights, () if recorder is None else recorder.streams)
        run = functools.partial(self._runner.run, self, fn, args, kwargs, weights, recorder)
        if self.mirrors.is_single:
            results = run() if recorder is None else self.mirrors.call_in_use(fn, run)
            return self.counting.regrouped(results)
        idle = [i for i, weight in enumerate(weights) if weight == 0.0]
        try:
            with undone(self.mirrors, idle) if idle else nullcontext():
                results = self.mirrors.call_in_use(fn, run)
            self.mirrors.watch.check()
            self.mirrors.parts.check()
            self.mirrors.groups.settle(len(self._devices))
        finally:
            self.mirrors.groups.forget()
        # Only where all replicas have succeeded: a run that fails leaves all as it was.
        self.mirrors.buffers.end(weights, recorder)
        self.mirrors.metrics.end(weights)
        return self.counting.regrouped(results)

    def _undo_drawing(self) -> None:
        """After a run that is undone: random generators of the program are what they were."""
        if self._runner.of_run is not None:
            self._runner.of_run.undo()

    def merge_call(
        self,
        context: ReplicaContext,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Does the work of `ReplicaContext.merge_call`."""
        return merge(context, merge_fn, args, kwargs)

    def close(self) -> None:
        """Ends the threads of the replicas, and leaves the other workers."""
        if self._process != os.getpid() and self.workers.are_many:
            return
        self._forget_hook()
        # First, because it ends what the threads may wait for.
        self.workers.communicator.close()
        self.gradients.close()
        self._captures.close()
        self._runner.close()
        self.cross_device_ops.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> StrategyExtended:
        return self._duplicate()


def _memories(
    devices: tuple[Device, ...],
) -> tuple[tuple[Hashable, ...], tuple[torch.device, ...]]:
    """Returns the memory and the torch device of each replica."""
    machine = this_machine()
    memories = tuple(machine.memory(device) for device in devices)
    return memories, tuple(machine.torch_device(device) for device in devices)
