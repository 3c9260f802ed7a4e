"""Loaders that read another share of the samples than the one that a program gave.

With `AutoShardPolicy.FILE`, a worker reads every W-th member of a dataset that is made of files. A
`DistributedSampler` that was left in a loader must not leave samples out, because batches are split
here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from unisono.errors import UnsupportedError
from unisono.input.options import InputContext
from unisono.input.source.sources import DRAW_AT_ONCE, loader_like, sampler_of
from unisono.sharing import computed_once

_logger = logging.getLogger("unisono")
_INSTEAD = (
    "Use AutoShardPolicy.DATA, or make each worker's dataset in "
    "`distribute_datasets_from_function`."
)


def of_own_files(source: Any, context: InputContext) -> DataLoader[Any]:
    """Returns a loader like `source` that reads the files of one worker: w, w + W, ...

    A file is a member of a `ConcatDataset`, or of a `ChainDataset` if it can only be iterated.
    """
    if type(source) is not DataLoader:
        raise UnsupportedError(
            "AutoShardPolicy.FILE needs a `DataLoader` over a `ConcatDataset` or `ChainDataset`, "
            f"got a {type(source).__name__}. {_INSTEAD}"
        )
    dataset = source.dataset
    if not isinstance(dataset, (ConcatDataset, ChainDataset)):
        raise UnsupportedError(
            "AutoShardPolicy.FILE needs a `ConcatDataset` or `ChainDataset` with one member per "
            f"file, got a {type(dataset).__name__}. {_INSTEAD}"
        )
    files = list(dataset.datasets)
    num_workers = context.num_input_pipelines
    if len(files) < num_workers:
        raise UnsupportedError(
            f"AutoShardPolicy.FILE gives each of the {num_workers} workers its own files, but "
            f"there are only {len(files)}. Split the data into at least {num_workers} files, or "
            "use AutoShardPolicy.DATA."
        )
    own = files[context.input_pipeline_id :: num_workers]
    if isinstance(dataset, ChainDataset):
        return _reading(source, None, dataset=ChainDataset(own))
    read: ConcatDataset[Any] = ConcatDataset(own)
    return _reading(source, _own_sampler(source, read), dataset=read)


def _reading(source: DataLoader[Any], sampler: Any, **settings: Any) -> DataLoader[Any]:
    """Returns a loader like `source` that reads what another sampler gives."""
    return loader_like(
        source,
        sampler=sampler,
        batch_size=source.batch_size,
        drop_last=source.drop_last,
        persistent_workers=source.persistent_workers,
        **settings,
    )


def _own_sampler(source: DataLoader[Any], files: ConcatDataset[Any]) -> Any:
    sampler: Any = source.sampler
    has_own_batches = type(source.batch_sampler) in (BatchSampler, type(None))
    if has_own_batches and type(sampler) is SequentialSampler:
        return SequentialSampler(files)
    if has_own_batches and type(sampler) is RandomSampler and sampler._num_samples is None:
        return RandomSampler(files, sampler.replacement, generator=sampler.generator)
    kind = sampler if has_own_batches else source.batch_sampler
    raise UnsupportedError(
        "AutoShardPolicy.FILE reads files in order or with `shuffle=True`, but not with a "
        f"{type(kind).__name__}. {_INSTEAD}"
    )


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


DRAW_AT_ONCE.add(AllSamples)


def of_all_samples(source: Any) -> Any:
    """Returns `source`, or a loader that reads what its `DistributedSampler` would leave out.

    Of each batch the replicas get their parts, so a sampler that leaves the samples of other
    replicas out would lose them.
    """
    sampler = sampler_of(source)
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
    return _reading(source, AllSamples(sampler))


def check_share(source: Any, context: InputContext) -> None:
    """Raises if a `DistributedSampler` reads another share than that of this worker's pipeline."""
    sampler = sampler_of(source)
    if sampler is None:
        return
    own = context.input_pipeline_id, context.num_input_pipelines
    if (sampler.rank, sampler.num_replicas) != own:
        raise UnsupportedError(
            f"{_described(sampler)} This is input pipeline {own[0]} of {own[1]}, so samples would "
            f"be lost. Make the sampler with `num_replicas={own[1]}, rank={own[0]}`, which the "
            "`InputContext` has."
        )


def _described(sampler: DistributedSampler[Any]) -> str:
    return (
        f"The sampler of this `DataLoader` is a {type(sampler).__name__}, which reads part "
        f"{sampler.rank} of {sampler.num_replicas} of the samples."
    )


@computed_once
def _tell(what: str) -> None:
    _logger.warning(what)
