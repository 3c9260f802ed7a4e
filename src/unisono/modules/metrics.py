"""Metrics that are modules with states, as those of torchmetrics are.

On a replica a metric counts the samples of that replica, from the start of each run. At the end of
the run the states of all replicas of all workers are merged into those of the primary. So on every
worker the primary has every sample once, and computing its value needs no communication.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from unisono.contexts import current_replica
from unisono.errors import ReplicaMismatchError, UnequalCollectivesError, UnsupportedError, add_note
from unisono.kernels import reduce_batch
from unisono.modules.metric_notes import (
    HAD_BEEN_RESET,
    NOTES,
    UPDATES,
    WAS_RESET,
    NoMetrics,
    is_metric,
    is_own,
)
from unisono.options import ReduceOp
from unisono.reductions import Workers


class Part(NamedTuple):
    """What one replica counted in a run."""

    num_updates: int
    was_reset: bool
    # Tensors, and lists of tensors.
    states: dict[str, Any]


class MirroredMetric(NamedTuple):
    """A metric, and its clones."""

    number: int
    name: str
    primary: weakref.ref[nn.Module]
    clones: list[nn.Module]
    fixed: dict[str, Any]

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the primary."""
        attributes: dict[str, Any] = object.__getattribute__(self.primary(), "__dict__")
        return attributes

    def prepare(self, places: Sequence[torch.device], workers: Workers) -> None:
        """Makes new clones count from zero, and lets them find each other for merging."""
        # All that a process group could add is merged already; `bool()` is False.
        self.attributes["distributed_available_fn"] = bool
        notes = {name: self.attributes[name] for name in NOTES if name in self.attributes}
        for clone, place in zip(self.clones, places, strict=True):
            cls: Any = type(clone)
            clone.__dict__.update(
                notes,
                _device=place,
                distributed_available_fn=lambda: current_replica() is not None,
                _sync_dist=functools.partial(_synchronize, self, workers),
                update=cls._wrap_update(clone, types.MethodType(cls.update, clone)),
                compute=cls._wrap_compute(clone, types.MethodType(cls.compute, clone)),
            )
            self._start(clone)

    def begin(self) -> None:
        """Before a run: forgets what was counted in the last one."""
        for clone in self.clones:
            own = clone.__dict__
            own["_computed"] = None
            own.update(self.fixed)
            if own["_update_count"] or own[WAS_RESET]:
                self._start(clone)

    def _start(self, clone: nn.Module) -> None:
        own = clone.__dict__
        own.update(_update_count=0, _computed=None, _cache=None, _is_synced=False)
        own[WAS_RESET] = own[HAD_BEEN_RESET] = False
        for name, default in own["_defaults"].items():
            if not isinstance(default, Tensor):
                own[name] = []
            elif _how(own["_reductions"][name]) == "sum":
                # The primary has the default already.
                own[name] = torch.zeros_like(default, device=own["_device"])
            else:
                own[name] = default.detach().to(own["_device"], copy=True)

    @property
    def is_changed(self) -> bool:
        """Whether a replica of this worker has updated or reset it in this run."""
        fixed = self.fixed.items()
        return any(
            own[UPDATES] or own[WAS_RESET] or any(own[name] is not value for name, value in fixed)
            for own in map(vars, self.clones)
        )

    def part_of(self, clone: nn.Module) -> Part:
        """Returns what a replica has counted."""
        own = clone.__dict__
        for name, value in self.fixed.items():
            if own[name] is not value:
                self._refuse(f"keeps {name!r} between updates, which is not one of its states")
        states = {name: own[name] for name in own["_defaults"]} if own["_update_count"] else {}
        return Part(own["_update_count"], own[WAS_RESET], states)

    def merged(self, parts: Sequence[Part], *, with_own: bool = True) -> tuple[int, dict[str, Any]]:
        """Returns the number of updates and the states of the primary and all replicas together."""
        if any(part.was_reset for part in parts) or not with_own:
            num_before = 0
            states: dict[str, Any] = {
                name: default.detach().clone() if isinstance(default, Tensor) else []
                for name, default in self.attributes["_defaults"].items()
            }
        else:
            states = {name: self.attributes[name] for name in self.attributes["_defaults"]}
            num_before = self.attributes["_update_count"]
        updated = [part for part in parts if part.num_updates]
        if not updated:
            return num_before, states
        for name, reduction in self.attributes["_reductions"].items():
            if reduction is None and isinstance(self.attributes["_defaults"][name], Tensor):
                self._refuse(f"has a state {name!r} with `dist_reduce_fx=None`")
        weights = [num_before, *(part.num_updates for part in updated)]
        for name, own in states.items():
            values = [part.states[name] for part in updated]
            states[name] = self._reduced(name, own, values, weights)
        # If all replicas make one update, that is one update on one device.
        return num_before + max(part.num_updates for part in updated), states

    def _refuse(self, why: str) -> None:
        raise UnsupportedError(
            f"{self.name} was updated on replicas, but it {why}, so the results of the replicas "
            "cannot be merged. Return predictions and targets from the step, and update the metric "
            "outside `run` with `metric.update(strategy.gather(predictions, axis=0), "
            "strategy.gather(targets, axis=0))`."
        )

    def _reduced(self, name: str, own: Any, values: list[Any], weights: list[int]) -> Any:
        if isinstance(own, list) or isinstance(values[0], list):
            return [one for value in (own, *values) for one in _as_list(value)]
        reduction = self.attributes["_reductions"][name]
        how = _how(reduction)
        here = [value.to(own.device) for value in values]
        if how == "sum":
            # In the order of all sums over replicas.
            total: Tensor = reduce_batch(ReduceOp.SUM, [tuple(here)], [1])[0][0]
            return own + total
        if how == "mean":
            weighted = [one * weight for one, weight in zip([own, *here], weights, strict=True)]
            return torch.stack(weighted).sum(0) / sum(weights)
        if how in ("max", "min"):
            return functools.reduce(torch.maximum if how == "max" else torch.minimum, here, own)
        return reduction(torch.cat([own, *here]) if how == "cat" else torch.stack([own, *here]))


class Metrics(NoMetrics):
    """The metrics of one strategy."""

    def __init__(self, places: tuple[torch.device, ...], workers: Workers) -> None:
        self._places = places
        self._workers = workers
        # By identity, because metrics hash by their states.
        self._metrics: WeakIdKeyDictionary = WeakIdKeyDictionary()
        # Workers name a metric by its number.
        self._num_found = 0

    def track(self, modules: Sequence[tuple[nn.Module, list[nn.Module]]]) -> None:
        before, found = self._metrics, WeakIdKeyDictionary()
        for module, clones in modules:
            attributes = object.__getattribute__(module, "__dict__")
            if is_metric(attributes):
                self._num_found += module not in before
                number = before[module].number if module in before else self._num_found
                name = type(module).__name__
                fixed = {
                    key: value
                    for key, value in attributes.items()
                    if isinstance(value, (int, float, Tensor))
                    and not (isinstance(value, bool) or is_own(attributes, key))
                }
                metric = MirroredMetric(number, name, weakref.ref(module), clones, fixed)
                metric.prepare(self._places, self._workers)
                found[module] = metric
        self._metrics = found

    def begin(self) -> None:
        for metric in self._metrics.values():
            metric.begin()

    def end(self, weights: Sequence[float]) -> None:
        """After a successful run: adds the counts of all replicas to the primaries."""
        metrics = list(self._metrics.values())
        if not any(metric.is_changed for metric in metrics):
            return
        try:
            everybody = _parts_of_all(metrics, self._workers, [weight > 0 for weight in weights])
        except UnequalCollectivesError as error:
            add_note(
                error,
                "Raised when what the replicas have counted was brought together, at the end of "
                "`run`. Every worker must make the same runs, and update metrics in the same ones.",
            )
            raise
        for metric in metrics:
            if metric.number in everybody:
                num_updates, states = metric.merged(everybody[metric.number])
                metric.attributes.update(states, _update_count=num_updates, _computed=None)


def _synchronize(metric: MirroredMetric, workers: Workers, *_: Any, **__: Any) -> None:
    """On a replica, for `compute()` in a step: gives its clone what all have counted so far."""
    context = current_replica()
    assert context is not None
    own = metric.clones[context.local_id].__dict__
    # In `forward`, the value is that of a batch.
    with_own = own["_should_unsync"]

    def work(is_counted: list[bool]) -> list[Any]:
        parts = _parts_of_all([metric], workers, is_counted).get(metric.number, [])
        return [metric.merged(parts, with_own=with_own)[1]] * len(is_counted)

    what = f"{metric.name}.compute()"
    states = context.meeting.meet(context.local_id, what, context.counts, work)
    for name, value in states.items():
        is_list = isinstance(value, list)
        own[name] = list(value) if is_list else value.to(own["_device"], copy=True)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _how(reduction: Any) -> str:
    """Returns "sum", "mean", "max", "min" or "cat", or "" for any other function."""
    prefix, _, how = getattr(reduction, "__name__", "").partition("dim_zero_")
    return "" if prefix else how


def _parts_of_all(
    metrics: Sequence[MirroredMetric], workers: Workers, is_counted: list[bool]
) -> dict[int, list[Part]]:
    """Returns what all replicas of all workers have counted, by the numbers of the metrics."""
    found = {}
    for metric in metrics:
        pairs = zip(metric.clones, is_counted, strict=True)
        parts = [metric.part_of(clone) for clone, counts in pairs if counts]
        if any(part.num_updates or part.was_reset for part in parts):
            found[metric.number] = parts
    if not workers.are_many:
        return found
    names = {metric.number: metric.name for metric in metrics}
    for number, parts in found.items():
        for name, value in ((n, v) for part in parts for n, v in part.states.items()):
            if not all(isinstance(one, Tensor) for one in _as_list(value)):
                raise UnsupportedError(
                    f"The state {name!r} of {names[number]} holds objects other than tensors, "
                    "which workers cannot exchange. Update the metric outside `run`."
                )
    everybody: dict[int, list[Part]] = {}
    for of_worker in workers.gather_objects(found):
        for number, parts in of_worker.items():
            if number not in names:
                raise ReplicaMismatchError(
                    "Another worker has updated a metric that this worker does not have. Make and "
                    "update the same metrics in the same order on every worker."
                )
            everybody.setdefault(number, []).extend(parts)
    return everybody
