"""FILE: a worker reads every W-th member of a dataset that is made of files."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
)

from unisono.errors import UnsupportedError
from unisono.input.options import InputContext
from unisono.input.sources.loaders import copied_settings

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
    files = _own_files(source.dataset, context)
    settings = copied_settings(source) | {
        "dataset": files,
        "batch_size": source.batch_size,
        "drop_last": source.drop_last,
        "persistent_workers": source.persistent_workers,
    }
    if isinstance(files, ConcatDataset):
        settings["sampler"] = _own_sampler(source, files)
    return DataLoader(**settings)


def _own_files(dataset: Dataset[Any], context: InputContext) -> Dataset[Any]:
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
    return ConcatDataset(own) if isinstance(dataset, ConcatDataset) else ChainDataset(own)


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
