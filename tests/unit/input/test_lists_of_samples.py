"""Batches in which lists have an entry per sample, as `collate_fn=list` makes them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, IterableDataset

import unisono as uo
from unisono.devices import cpu_slots
from unisono.errors import UnsupportedError
from unisono.input import DistributedDataset, DistributedDatasetsFromFunction, InputContext
from unisono.values import select_replica

Collate = Callable[[list[Any]], Any]

ROWS = torch.arange(24.0).view(8, 3)
TWO_WAYS = "can be read in two ways: one sample per entry, or {} samples in the first dimension"


def steps(source: Any, num_replicas: int = 2, **options: Any) -> list[list[Any]]:
    """What the code on each replica sees, step by step."""
    dataset = DistributedDataset(source, cpu_slots(num_replicas), uo.InputOptions(**options))
    return [[select_replica(i, element) for i in range(num_replicas)] for element in dataset]


def stacked_labels(batch: list[Any]) -> Any:
    return [x for x, _ in batch], torch.tensor([int(y) for _, y in batch])


def columns(batch: list[Any]) -> Any:
    return tuple(zip(*batch, strict=True))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(ROWS)


@pytest.mark.parametrize(
    "sample",
    [
        lambda i: ROWS[i],
        lambda i: ROWS[i].numpy(),
        lambda i: (ROWS[i], torch.tensor(i)),
        lambda i: (ROWS[i], i),
        lambda i: (i, -i),
        lambda i: {"x": ROWS[i], "caption": None if i % 2 else "text"},
        lambda i: [ROWS[i], ROWS[i]],
    ],
    ids=["tensor", "array", "pair", "label", "ints", "dict", "list"],
)
def test_a_list_of_samples_is_split_by_sample(sample: Callable[[int], Any]) -> None:
    samples: Any = [sample(i) for i in range(8)]

    found = steps(DataLoader(samples, batch_size=5, collate_fn=list))

    assert [[len(part) for part in parts] for parts in found] == [[3, 2], [2, 1]]
    everything = [one for parts in found for part in parts for one in part]
    assert repr(everything) == repr(samples)


@pytest.mark.parametrize("collate", [columns, stacked_labels])
def test_fields_with_an_entry_per_sample_are_split_by_sample(collate: Collate) -> None:
    samples: Any = [(ROWS[i], torch.tensor(i)) for i in range(8)]

    found = steps(DataLoader(samples, batch_size=5, collate_fn=collate))

    assert [[len(xs) for xs, _ in parts] for parts in found] == [[3, 2], [2, 1]]
    for xs, ys in (part for parts in found for part in parts):
        assert [int(x[0]) // 3 for x in xs] == [int(y) for y in ys]


def test_numbers_as_tensors_are_split_with_the_samples() -> None:
    batch = ROWS[:4], [torch.tensor(i) for i in range(4)], [None] * 4

    ((first, second),) = steps([batch])

    assert [int(y) for y in first[1]] == [0, 1]
    assert [int(y) for y in second[1]] == [2, 3]
    assert second[2] == [None, None]


def test_numbers_as_tensors_that_are_not_one_per_sample_go_to_every_replica() -> None:
    batches = [(ROWS[:n], [torch.tensor(0.1), torch.tensor(0.2)]) for n in (4, 2)]

    assert [[len(part[1]) for part in parts] for parts in steps(batches)] == [[2, 2], [2, 2]]


@pytest.mark.parametrize(
    ("samples", "batch_size", "collate"),
    [
        (torch.zeros(8, 4), 4, list),
        (torch.zeros(8, 3, 5, 5), 3, list),
        (torch.zeros(3, 3, 5, 5), 4, list),
        (torch.zeros(8, 3), 4, tuple),
        ([(torch.zeros(3), i) for i in range(8)], 3, stacked_labels),
        (torch.zeros(8, 3), 4, lambda batch: batch[1:]),
    ],
    ids=["as wide", "as many channels", "one short batch", "tuple", "inner list", "filtered"],
)
def test_a_list_that_may_hold_fields_or_samples_is_refused(
    samples: Any, batch_size: int, collate: Collate
) -> None:
    loader = DataLoader(samples, batch_size=batch_size, collate_fn=collate)

    with pytest.raises(UnsupportedError, match=TWO_WAYS.format(r"\d")):
        steps(loader)


@pytest.mark.parametrize("batch_size", [2, 4])
@pytest.mark.parametrize("kind", [tuple, list])
def test_fields_are_split_along_each(batch_size: int, kind: type) -> None:
    samples: Any = [(ROWS[i], torch.tensor(i)) for i in range(8)]

    def collate(batch: list[Any]) -> Any:
        return kind(map(torch.stack, zip(*batch, strict=True)))

    for source in (
        DataLoader(samples, batch_size=batch_size, collate_fn=collate),
        DataLoader(samples, batch_size=batch_size),
    ):
        for step, parts in enumerate(steps(source)):
            rows = [row for x, _ in parts for row in x]
            assert torch.equal(torch.stack(rows), ROWS[step * batch_size :][:batch_size])


def test_a_batch_may_hold_more_rows_than_it_was_made_of() -> None:
    def twice(batch: list[Any]) -> Any:
        rows = torch.stack(batch).repeat(2, 1)
        return rows, rows

    found = steps(DataLoader(ROWS[:6], batch_size=3, collate_fn=twice))  # type: ignore[arg-type]

    assert [[len(x) for x, _ in parts] for parts in found] == [[3, 3], [3, 3]]


def test_what_the_first_batch_was_holds_for_a_last_one_that_is_ambiguous() -> None:
    found = steps(DataLoader(ROWS[:7], batch_size=4, collate_fn=list))  # type: ignore[arg-type]

    assert [[len(part) for part in parts] for parts in found] == [[2, 2], [2, 1]]
    found = steps(DataLoader(Stream(), batch_size=5, collate_fn=list))
    assert [[len(part) for part in parts] for parts in found] == [[3, 2], [2, 1]]


def test_an_epoch_is_resumed_with_lists_of_samples() -> None:
    def dataset() -> DistributedDataset:
        return DistributedDataset(
            DataLoader(ROWS[:6], batch_size=4, collate_fn=list),  # type: ignore[arg-type]
            cpu_slots(2),
        )

    begun = dataset()
    next(iter(begun))
    resumed = dataset()
    resumed.load_state_dict(begun.state_dict())

    (element,) = resumed
    assert [select_replica(i, element)[0].tolist() for i in range(2)] == ROWS[4:6].tolist()


@pytest.mark.parametrize("width", [3, 4])
def test_one_replica_gets_any_list(width: int) -> None:
    loader: Any = DataLoader(torch.zeros(4, width), batch_size=4, collate_fn=list)  # type: ignore[arg-type]
    iterator = iter(DistributedDataset(loader, cpu_slots(1)))

    assert [len(batch) for batch in iterator] == [4]
    assert iterator.last_counts == (4,)


@pytest.mark.parametrize("split", ["even", "tensorflow"])
def test_lists_of_samples_that_a_function_makes_are_counted(split: str) -> None:
    def make(_: InputContext) -> Any:
        return DataLoader(ROWS[:7], batch_size=2, collate_fn=list)  # type: ignore[arg-type]

    context, options = InputContext(num_replicas_in_sync=3), uo.InputOptions(split=split)
    iterator = iter(DistributedDatasetsFromFunction(make, context, cpu_slots(3), options))

    assert [iterator.last_counts for _ in iterator] == [(2, 2, 2), (1, 0, 0)]


@pytest.mark.parametrize(
    "batch",
    [
        pack_sequence([torch.zeros(4)]),
        (pack_sequence([torch.zeros(4)]), torch.zeros(4)),
        (torch.zeros(4), SimpleNamespace(nodes=torch.zeros(4))),
    ],
    ids=["packed", "packed and labels", "object"],
)
def test_what_hides_its_samples_is_refused(batch: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"Cannot split .*a (PackedSequence|SimpleName)"):
        steps([batch])


def test_what_hides_its_samples_may_be_given_whole() -> None:
    hidden = SimpleNamespace(nodes=torch.zeros(4))

    ((first, second),) = steps([(torch.zeros(4), hidden)], batch_dim=(0, None))

    assert first[1] is second[1] is hidden


def test_an_array_keeps_its_mask() -> None:
    batch = np.ma.masked_array([1, 2, 3, 4], mask=[False, True, False, True])

    ((first, second),) = steps([batch])

    assert first.mask.tolist() == second.mask.tolist() == [False, True]


def test_samples_of_as_many_fields_as_a_batch_has_samples_are_split_by_sample() -> None:
    samples: Any = [({"x": ROWS[i]}, (i, "text")) for i in range(3)]

    found = steps(DataLoader(samples, batch_size=2, collate_fn=list))

    assert [[[one[1][0] for one in part] for part in parts] for parts in found] == [
        [[0], [1]],
        [[2], [2]],
    ]


def test_a_stream_resumed_at_a_last_batch_that_is_ambiguous_is_refused() -> None:
    class Pairs(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return zip(ROWS, range(8), strict=True)

    loader = DataLoader(Pairs(), batch_size=5, collate_fn=columns)
    dataset = DistributedDataset(loader, cpu_slots(2))
    next(iter(dataset))
    dataset.load_state_dict(dataset.state_dict())

    with pytest.raises(UnsupportedError, match=TWO_WAYS.format(3)):
        list(dataset)
