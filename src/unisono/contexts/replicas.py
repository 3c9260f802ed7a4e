"""What contexts, variables and gradients need of the strategy that runs them.

A strategy hands itself down in this form, and the packages below it use nothing else of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from unisono.devices import Device
from unisono.options import ReduceOp
from unisono.reductions import CrossDeviceOps, ReplicaLayout, Workers

if TYPE_CHECKING:
    from unisono.contexts.current import ReplicaContext
    from unisono.gradients import GradientReducer
    from unisono.strategies import Strategy
    from unisono.variables import Leaves, Mirrors


class SampleCounts(Protocol):
    """How many samples each replica has in the run under way."""

    samples: tuple[int, ...] | None

    @property
    def presence(self) -> tuple[int, ...] | None:
        """For each replica of all workers whether it has samples, 1 or 0. None if all have."""

    def factors(self, op: ReduceOp) -> list[float]:
        """Returns what the values of this worker's replicas count for. Empty if all count alike."""

    def regrouped(self, results: Sequence[Any], *, are_arguments: bool = False) -> Any:
        """Makes one structure of what the replicas of this worker have returned."""


class Replicas(Protocol):
    """The replicas of a strategy on this worker. `StrategyExtended` implements it."""

    workers: Workers
    layout: ReplicaLayout
    cross_device_ops: CrossDeviceOps
    mirrors: Mirrors
    gradients: GradientReducer
    current_weights: list[float]
    # What makes runs that survive the loss of workers, if something does.
    elastic: Any

    @property
    def counting(self) -> SampleCounts:
        """How many samples each replica has."""

    @property
    def strategy(self) -> Strategy:
        """The strategy, for programs and messages."""

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        """The devices of the replicas."""

    @property
    def first_replica_id(self) -> int:
        """The number of the first replica among those of all workers."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas on all workers."""

    def adopt(self, leaves: Leaves) -> None:
        """Trains what belongs to no module, from now on."""

    def merge_call(
        self,
        context: ReplicaContext,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Does the work of `ReplicaContext.merge_call`."""

    def reduce_to(self, reduce_op: ReduceOp | str, value: Any, destinations: Any) -> Any:
        """Reduces a value over the replicas of all workers, to devices."""
