"""What modules note that are metrics, as those of torchmetrics are. Few programs have one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from unisono.reductions import Workers

# The attribute with the number of updates.
UPDATES = "_update_count"
# What metrics note about themselves, and methods that they keep bound to themselves. It concerns
# the one that has it, and no clone.
NOTES = frozenset(
    (
        *("_cache", "_computed", "_enable_grad", "_forward_cache", "_is_synced", "_should_unsync"),
        *("_to_sync", "compute", "compute_on_cpu", "update", UPDATES),
    )
)
# Whether a clone was reset in this run, and whether it had been before it was last reset.
WAS_RESET, HAD_BEEN_RESET = "_unisono_was_reset", "_unisono_had_been_reset"


def is_metric(attributes: dict[str, Any]) -> bool:
    """Whether a module with these attributes has states as the metrics of torchmetrics have."""
    get = attributes.get
    return isinstance(get("_defaults"), dict) and isinstance(get("_reductions"), dict)


def is_own(attributes: dict[str, Any], name: str) -> bool:
    """Whether an attribute is a state of a metric or about one, of which clones have their own."""
    return is_metric(attributes) and (name in NOTES or name in attributes["_defaults"])


def is_clone(attributes: dict[str, Any]) -> bool:
    """Whether a metric with these attributes is that of one replica."""
    return WAS_RESET in attributes


def note_updates(clone: nn.Module, count: int) -> None:
    """Notes what becomes of a clone whose number of updates is set to `count`."""
    own = clone.__dict__
    if count == 0:
        own[HAD_BEEN_RESET] = own[WAS_RESET]
        own[WAS_RESET] = True
    elif count != own[UPDATES] + 1:
        own[WAS_RESET] = own[HAD_BEEN_RESET]


class NoMetrics:
    """The metrics of a strategy that has none."""

    def track(self, modules: Sequence[tuple[nn.Module, list[nn.Module]]]) -> None:
        """Says which modules there are, each with its clones."""

    def begin(self) -> None:
        """Before a run."""

    def end(self, weights: Sequence[float]) -> None:
        """After a successful run."""


def tracked(
    metrics: NoMetrics,
    modules: Sequence[tuple[nn.Module, list[nn.Module]]],
    places: tuple[torch.device, ...],
    workers: Workers,
) -> NoMetrics:
    """Returns the metrics of a strategy, which has these modules now, each with its clones."""
    if type(metrics) is NoMetrics and any(
        is_metric(object.__getattribute__(module, "__dict__")) for module, _ in modules
    ):
        from unisono.modules.metrics import Metrics

        metrics = Metrics(places, workers)
    metrics.track(modules)
    return metrics
