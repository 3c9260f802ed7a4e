import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from unisono.devices import cpu_slots
from unisono.errors import ReplicaMismatchError, UnsupportedError
from unisono.input import (
    DistributedDatasetsFromFunction,
    InputContext,
    InputOptions,
    InputReplicationMode,
    ValueContext,
    values_from_function,
)
from unisono.values import PerReplica, map_leaves, select_replica
from unit.input.parts import own_samples

TENSORFLOW = InputOptions(split="tensorflow")
PER_REPLICA = InputOptions(experimental_replication_mode=InputReplicationMode.PER_REPLICA)


def distributed(
    dataset_fn: Callable[[InputContext], Any],
    num_replicas: int = 2,
    options: InputOptions | None = None,
    context: InputContext | None = None,
) -> DistributedDatasetsFromFunction:
    context = context or InputContext(num_replicas_in_sync=num_replicas)
    return DistributedDatasetsFromFunction(dataset_fn, context, cpu_slots(num_replicas), options)


def lists(dataset: Iterable[Any]) -> list[list[Any]]:
    return [own_samples(element) for element in dataset]


def test_elements_are_dealt_in_turn() -> None:
    steps = lists(distributed(lambda _: list(range(10))))

    assert steps == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


def test_scalars_that_do_not_make_a_step_are_dealt_too() -> None:
    *_, last = distributed(lambda _: [*torch.arange(5)])

    assert (last.counts, [int(part) for part in last.values]) == ((1, 0), [4, 4])


def test_scalars_that_do_not_make_a_step_are_dropped_as_by_tensorflow() -> None:
    assert lists(distributed(lambda _: [*torch.arange(5)], 2, TENSORFLOW)) == [[0, 1], [2, 3]]


def test_replicas_without_a_batch_get_a_sample_that_counts_nothing() -> None:
    dataset = distributed(lambda _: list(torch.arange(6).split(2)))

    *_, last = dataset
    assert lists(dataset) == [[[0, 1], [2, 3]], [[4, 5], []]]
    assert [part.tolist() for part in last.values] == [[4, 5], [4]]
    assert len(dataset) == 2


def test_replicas_without_a_batch_get_an_empty_one_as_by_tensorflow() -> None:
    *_, last = distributed(lambda _: list(torch.arange(6).split(2)), 2, TENSORFLOW)

    assert [part.tolist() for part in last.values] == [[4, 5], []]


def test_a_batch_without_samples_is_replaced_by_one_that_counts_nothing() -> None:
    (element,) = distributed(lambda _: [torch.zeros(0, 3), torch.ones(2, 3)])

    assert element.counts == (0, 2)
    assert element.values[0].tolist() == [[1, 1, 1]]


def test_a_loader_that_drops_incomplete_batches_drops_an_incomplete_step_too() -> None:
    def dataset_fn(_: InputContext) -> Any:
        return DataLoader(torch.arange(6), batch_size=2, drop_last=True)  # type: ignore[arg-type]

    dataset = distributed(dataset_fn)

    assert lists(dataset) == [[[0, 1], [2, 3]]]
    assert len(dataset) == 1


def test_a_function_is_called_once_a_replica_and_step() -> None:
    numbers = itertools.count(1)
    iterator = iter(distributed(lambda _: lambda: next(numbers)))

    assert lists(next(iterator) for _ in range(2)) == [[1, 2], [3, 4]]


def test_a_function_ends_the_input_with_stop_iteration() -> None:
    batches = iter(torch.arange(6).split(2))

    assert lists(distributed(lambda _: lambda: next(batches))) == [[[0, 1], [2, 3]], [[4, 5], []]]


def test_a_function_may_start_again_after_its_end() -> None:
    batches = itertools.cycle([*torch.arange(6).split(2), None])

    def draw() -> Any:
        batch = next(batches)
        if batch is None:
            raise StopIteration
        return batch

    dataset = distributed(lambda _: draw)

    for _ in range(2):
        assert lists(dataset) == [[[0, 1], [2, 3]], [[4, 5], []]]


@pytest.mark.parametrize(("pipeline_id", "total"), [(0, 10), (1, 35)])
def test_the_context_says_which_shard_to_make(pipeline_id: int, total: int) -> None:
    def dataset_fn(context: InputContext) -> Any:
        batches = torch.arange(100).split(context.get_per_replica_batch_size(10))
        return list(batches)[context.input_pipeline_id :: context.num_input_pipelines]

    dataset = distributed(dataset_fn, 1, context=InputContext(2, pipeline_id, 2))

    first = next(iter(dataset))
    assert int(first.values[0].sum()) == total


def test_with_per_replica_each_replica_is_a_pipeline() -> None:
    contexts = []

    def dataset_fn(context: InputContext) -> Any:
        contexts.append(context)
        return list(torch.arange(4) + 10 * context.input_pipeline_id)

    dataset = distributed(dataset_fn, options=PER_REPLICA)

    assert contexts == [InputContext(2, 0, 2), InputContext(2, 1, 2)]
    assert lists(dataset) == [[0, 10], [1, 11], [2, 12], [3, 13]]


def test_a_pipeline_that_ends_early_gives_no_more_samples() -> None:
    def dataset_fn(context: InputContext) -> Any:
        return [torch.tensor([i]) for i in range(1 + context.input_pipeline_id)]

    assert lists(distributed(dataset_fn, options=PER_REPLICA)) == [[[0], [0]], [[], [1]]]


def test_a_dataset_on_the_devices_is_handed_out_as_on_them() -> None:
    options = InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=InputReplicationMode.PER_REPLICA,
        experimental_place_dataset_on_device=True,
    )

    (element,) = distributed(lambda _: [torch.arange(2)], options=options)

    assert element.devices == cpu_slots(2)


def test_batches_need_no_common_number_of_samples() -> None:
    ragged = [[torch.zeros(3, 5, 5), torch.zeros(3, 7, 7)], {"boxes": torch.zeros(9, 4)}]

    (element,) = distributed(lambda _: [ragged, ragged])

    assert element[1]["boxes"].values[1].shape == (9, 4)


def test_batches_of_different_structure_are_an_error_at_their_step() -> None:
    iterator = iter(distributed(lambda _: [1, 2, 3, {"a": 1}, 5, 6]))
    next(iterator)

    with pytest.raises(ReplicaMismatchError):
        next(iterator)
    assert next(iterator).values == (5, 6)


def test_a_single_replica_gets_bare_batches() -> None:
    assert list(distributed(lambda _: [1, 2], 1)) == [1, 2]


@pytest.mark.parametrize("wrong", [None, 3, TensorDataset(torch.arange(2))], ids=type)
def test_a_function_that_makes_no_batches_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(UnsupportedError, match="The input function did not return batches"):
        distributed(lambda _: wrong)


@given(st.integers(0, 30), st.integers(1, 6), st.integers(1, 5), st.booleans())
def test_no_sample_is_lost_or_doubled(
    num_samples: int, batch_size: int, num_replicas: int, is_per_replica: bool
) -> None:
    def dataset_fn(context: InputContext) -> Any:
        batches = list(torch.arange(num_samples).split(batch_size)) if num_samples else []
        return batches[context.input_pipeline_id :: context.num_input_pipelines]

    iterator = iter(distributed(dataset_fn, num_replicas, PER_REPLICA if is_per_replica else None))

    seen: list[int] = []
    for element in iterator:
        parts = element.values if isinstance(element, PerReplica) else (element,)
        counted = [part for part, n in zip(parts, iterator.last_counts, strict=True) if n]
        assert sum(map(len, counted)) == sum(iterator.last_counts)
        seen += torch.cat(counted).tolist()

    assert seen == list(range(num_samples))


def values_of(value_fn: Any, num_replicas: int) -> Any:
    contexts = [ValueContext(i, num_replicas) for i in range(num_replicas)]
    return values_from_function(value_fn, cpu_slots(num_replicas), contexts)


def test_values_are_made_once_a_replica_and_wrapped() -> None:
    value = values_of(lambda context: {"id": context}, 2)

    assert value["id"].replica_id_in_sync_group.values == (0, 1)
    assert [select_replica(i, value)["id"] for i in range(2)] == [
        ValueContext(0, 2),
        ValueContext(1, 2),
    ]
    assert values_of(lambda _: 5, 1).values == (5,)


def test_values_can_be_those_of_one_of_several_hosts() -> None:
    contexts = [ValueContext(2, 4), ValueContext(3, 4)]

    value = values_from_function(
        lambda context: context.replica_id_in_sync_group, cpu_slots(2), contexts
    )

    assert value.values == (2, 3)


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("value", [(1, 2), [1, 2], {"a": (1, 2)}, (1, (2, "x")), (), 5])
def test_a_value_of_numbers_is_taken_apart(num_replicas: int, value: Any) -> None:
    found = values_of(lambda _: value, num_replicas)

    def shown(part: Any) -> Any:
        assert isinstance(part, PerReplica)
        return part.values

    expected = map_leaves(lambda leaf: (leaf,) * num_replicas, value)
    assert map_leaves(shown, found) == expected
