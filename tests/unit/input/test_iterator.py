import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from unisono.contexts import ReplicaContext, entered
from unisono.devices import cpu_slots
from unisono.errors import ContextError, EndOfInputError
from unisono.input import DistributedDataset, DistributedIterator, InputOptions

each_buffer = pytest.mark.parametrize("buffer_size", [0, 1, 2])


def iterator_over(batches: Any, buffer_size: int = 1) -> DistributedIterator:
    options = InputOptions(experimental_per_replica_buffer_size=buffer_size)
    return iter(DistributedDataset(batches, cpu_slots(2), options))


class Failing:
    """Fails in the place of its second batch, and goes on."""

    def __init__(self) -> None:
        self.num_drawn = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.num_drawn += 1
        if self.num_drawn == 2:
            raise KeyError("lost file")
        if self.num_drawn == 4:
            raise StopIteration
        return torch.full((2,), self.num_drawn)


@each_buffer
def test_the_end_is_stop_iteration_again_and_again(buffer_size: int) -> None:
    iterator = iterator_over([torch.arange(2)], buffer_size)
    next(iterator)

    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)


@each_buffer
def test_get_next_says_that_the_input_has_ended(buffer_size: int) -> None:
    iterator = iterator_over([torch.arange(2)], buffer_size)
    assert iterator.get_next().values[1].item() == 1

    for _ in range(2):
        with pytest.raises(EndOfInputError, match="ended after 1 steps"):
            iterator.get_next()


@each_buffer
def test_an_optional_has_a_value_until_the_end(buffer_size: int) -> None:
    iterator = iterator_over([torch.arange(2)], buffer_size)

    assert iterator.get_next_as_optional().get_value().values[1].item() == 1
    nothing = iterator.get_next_as_optional()
    assert not nothing.has_value()
    with pytest.raises(EndOfInputError, match="has_value"):
        nothing.get_value()


@each_buffer
def test_initialize_starts_over_even_after_the_end(buffer_size: int) -> None:
    iterator = iterator_over([torch.arange(2), torch.arange(4)], buffer_size)
    iterator.initialize()
    next(iterator)
    iterator.initialize()

    assert len(list(iterator)) == 2
    iterator.initialize()
    assert len(list(iterator)) == 2


def test_initialize_before_the_first_step_draws_nothing() -> None:
    iterator = iterator_over(torch.arange(2) for _ in range(2))

    iterator.initialize()

    assert len(list(iterator)) == 2


@each_buffer
def test_an_error_of_the_source_is_raised_once_at_its_step(buffer_size: int) -> None:
    iterator = iterator_over(Failing(), buffer_size)

    assert next(iterator).values[0].item() == 1
    with pytest.raises(KeyError, match="lost file"):
        next(iterator)
    assert next(iterator).values[0].item() == 3
    with pytest.raises(StopIteration):
        next(iterator)


@each_buffer
def test_a_batch_that_cannot_be_split_is_an_error_at_its_step(buffer_size: int) -> None:
    iterator = iterator_over([torch.arange(2), torch.tensor(1), torch.arange(2)], buffer_size)
    next(iterator)

    with pytest.raises(ValueError, match="no batch dimension"):
        next(iterator)
    assert len(list(iterator)) == 1


def test_counts_are_those_of_the_step_handed_out() -> None:
    iterator = iterator_over([torch.arange(4), torch.arange(1)], buffer_size=2)

    counts = [iterator.last_counts, *(iterator.last_counts for _ in iterator)]

    assert counts == [(), (2, 2), (1, 0)]


def test_the_host_keeps_what_is_not_fetched_to_the_device() -> None:
    options = InputOptions(experimental_fetch_to_device=False)
    (element,) = DistributedDataset([torch.arange(2)], cpu_slots(5)[3:], options)

    assert element.devices == cpu_slots(2)


def test_a_replica_does_not_ask_for_the_next_step() -> None:
    iterator = iterator_over([torch.arange(2)])
    replica = ReplicaContext.__new__(ReplicaContext)
    replica.__dict__.update(strategy=cast(Any, SimpleNamespace()))

    with entered(replica), pytest.raises(ContextError, match="outside `run`"):
        next(iterator)
    assert iterator.last_counts == ()


def test_closing_ends_the_pass_and_its_thread() -> None:
    iterator = iterator_over([torch.arange(2)] * 9, buffer_size=2)
    next(iterator)
    assert any(thread.name == "unisono-input" for thread in threading.enumerate())

    iterator.close()

    assert not any(thread.name == "unisono-input" for thread in threading.enumerate())
    assert list(iterator) == []
