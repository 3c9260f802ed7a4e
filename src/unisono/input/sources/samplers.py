"""A `DistributedSampler` that was left in a loader, though the batches are split here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

from unisono.errors import UnsupportedError
from unisono.input.options import InputContext
from unisono.input.sources.loaders import copied_settings, draws_at_once
from unisono.sharing import computed_once

_logger = logging.getLogger("unisono")


class AllSamples(Sampler[int]):
    """All samples, in the order that a `DistributedSampler` gives them to one replica."""

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[int]:
        if not self._sampler.shuffle:
            return iter(range(len(self)))
        seed = self._sampler.seed + self._sampler.epoch
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        return iter(order.tolist())

    def __len__(self) -> int:
        return len(self._sampler.dataset)  # type: ignore[arg-type]


draws_at_once(AllSamples)


def of_all_samples(source: Any) -> Any:
    """Returns `source`, or a loader that reads what its `DistributedSampler` would leave out.

    Of each batch the replicas get their parts, so a sampler that leaves the samples of other
    replicas out would lose them.
    """
    sampler = _sampler_of(source)
    if sampler is None or sampler.num_replicas == 1:
        return source
    kinds = type(source), type(sampler), type(source.batch_sampler)
    if kinds != (DataLoader, DistributedSampler, BatchSampler):
        raise UnsupportedError(
            f"{_described(sampler)} The strategy splits batches over the replicas itself, so "
            "samples would be lost. Give the `DataLoader` the global batch size and a sampler that "
            "reads all samples."
        )
    _tell(
        f"{_described(sampler)} The strategy splits every batch over the replicas itself, so all "
        "samples are read, in the order that the sampler has for one replica, and the batch size "
        f"of {source.batch_size} is the global one. Remove the sampler; `shuffle=True` shuffles."
    )
    settings = copied_settings(source) | {
        "batch_size": source.batch_size,
        "drop_last": source.drop_last,
        "persistent_workers": source.persistent_workers,
        "sampler": AllSamples(sampler),
    }
    return DataLoader(**settings)


def check_share(source: Any, context: InputContext) -> None:
    """Raises if a `DistributedSampler` reads another share than that of this worker's pipeline."""
    sampler = _sampler_of(source)
    if sampler is None:
        return
    own = context.input_pipeline_id, context.num_input_pipelines
    if (sampler.rank, sampler.num_replicas) != own:
        raise UnsupportedError(
            f"{_described(sampler)} This is input pipeline {own[0]} of {own[1]}, so samples would "
            f"be lost. Make the sampler with `num_replicas={own[1]}, rank={own[0]}`, which the "
            "`InputContext` has."
        )


def _sampler_of(source: Any) -> DistributedSampler[Any] | None:
    if not isinstance(source, DataLoader):
        return None
    inner = getattr(source.batch_sampler, "sampler", None)
    samplers = (source.sampler, source.batch_sampler, inner)
    return next((one for one in samplers if isinstance(one, DistributedSampler)), None)


def _described(sampler: DistributedSampler[Any]) -> str:
    return (
        f"The sampler of this `DataLoader` is a {type(sampler).__name__}, which reads part "
        f"{sampler.rank} of {sampler.num_replicas} of the samples."
    )


@computed_once
def _tell(what: str) -> None:
    """Says something once."""
    _logger.warning(what)
