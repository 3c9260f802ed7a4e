import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler

from unisono.devices import cpu_slots
from unisono.input import DistributedDataset, InputOptions
from unisono.input.prefetch import Prefetcher
from unisono.input.source.sources import as_source

# From Python 3.12 on, starting workers by fork warns once torch has its own threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def input_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "unisono-input"]


class Counter:
    """Counts what was drawn, and says when it reaches a number."""

    def __init__(self) -> None:
        self.num_drawn = 0
        self.changed = threading.Condition()

    def __call__(self) -> int:
        with self.changed:
            self.num_drawn += 1
            self.changed.notify_all()
            return self.num_drawn

    def reaches(self, number: int, timeout: float = 5.0) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.num_drawn >= number, timeout)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_exactly_as_many_steps_as_asked_are_drawn_ahead(size: int) -> None:
    counter = Counter()
    steps = Prefetcher(counter, size)

    assert next(steps) == 1
    assert counter.reaches(1 + size)
    assert not counter.reaches(2 + size, timeout=0.05)
    assert next(steps) == 2
    assert counter.reaches(2 + size)
    steps.close()


def test_nothing_is_drawn_before_the_first_step() -> None:
    counter = Counter()
    steps = Prefetcher(counter, 2)

    assert counter.num_drawn == 0
    assert input_threads() == []
    steps.close()


def test_steps_come_in_order() -> None:
    numbers = iter(range(200))
    steps = Prefetcher(lambda: next(numbers), 3)

    assert list(steps) == list(range(200))


def test_the_first_step_is_drawn_by_the_caller_and_the_others_by_one_thread() -> None:
    calls = iter([threading.current_thread] * 5)
    first, *others = Prefetcher(lambda: next(calls)(), 2)

    assert first is threading.current_thread()
    assert len(set(others)) == 1
    assert first not in others


def test_the_thread_ends_with_the_last_step() -> None:
    list(Prefetcher(iter(range(3)).__next__, 2))

    assert input_threads() == []


def test_the_thread_of_an_abandoned_reader_ends() -> None:
    steps = Prefetcher(Counter(), 2)
    next(steps)
    assert len(input_threads()) == 1

    del steps

    assert input_threads() == []


def test_a_reader_in_a_reference_cycle_is_collected_with_its_thread() -> None:
    cycle: list[object] = [Prefetcher(Counter(), 2)]
    cycle.append(cycle)
    next(cycle[0])  # type: ignore[call-overload]

    del cycle
    gc.collect()

    assert input_threads() == []


def test_an_abandoned_pass_over_workers_leaves_no_thread_and_no_process() -> None:
    loader: DataLoader[Any] = DataLoader(range(100), batch_size=2, num_workers=2)  # type: ignore[arg-type]
    iterator = iter(DistributedDataset(loader, cpu_slots(2)))
    next(iterator)
    assert len(input_threads()) == 1
    gone = weakref.ref(iterator)

    del iterator

    assert gone() is None
    assert input_threads() == []
    assert torch.multiprocessing.active_children() == []


def test_a_reader_does_not_keep_the_interpreter_from_ending() -> None:
    script = (
        "import torch\nfrom unisono.devices import cpu_slots\n"
        "from unisono.input import DistributedDataset, InputOptions\n"
        "options = InputOptions(experimental_per_replica_buffer_size=2)\n"
        "it = iter(DistributedDataset([torch.arange(2)] * 9, cpu_slots(2), options))\n"
        "next(it); print('done')"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=240)

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"done\n", b"")


def test_an_error_does_not_end_the_steps() -> None:
    outcomes: list[Callable[[], int]] = [lambda: 1, lambda: 1 // 0, lambda: 3]
    calls = iter(outcomes)
    steps = Prefetcher(lambda: next(calls)(), 2)

    assert next(steps) == 1
    with pytest.raises(ZeroDivisionError):
        next(steps)
    assert list(steps) == [3]


class Own(Sampler[int]):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(range(4))


@pytest.mark.parametrize(
    ("settings", "is_alone"),
    [
        ({}, False),
        ({"shuffle": True}, False),
        ({"num_workers": 1}, True),
        ({"num_workers": 1, "shuffle": True}, True),
        ({"num_workers": 1, "sampler": Own()}, False),
        ({"num_workers": 1, "batch_sampler": [[0, 1]]}, False),
        (
            {"num_workers": 1, "batch_sampler": torch.utils.data.BatchSampler(Own(), 2, False)},
            False,
        ),
        ({"num_workers": 1, "sampler": RandomSampler(range(4))}, True),
    ],
)
def test_only_a_loader_that_draws_no_global_random_number_is_read_ahead_unasked(
    settings: dict[str, object], is_alone: bool
) -> None:
    loader: DataLoader[Any] = DataLoader(range(4), **settings)  # type: ignore[arg-type]

    assert as_source(loader).is_alone is is_alone


@pytest.mark.parametrize(
    ("buffer_size", "num_workers", "is_read_ahead"),
    [(0, 1, False), (1, 0, False), (1, 1, True), (2, 0, True)],
)
def test_a_larger_buffer_asks_for_reading_ahead_and_none_forbids_it(
    buffer_size: int, num_workers: int, is_read_ahead: bool
) -> None:
    loader: DataLoader[Any] = DataLoader(range(8), batch_size=2, num_workers=num_workers)  # type: ignore[arg-type]
    options = InputOptions(experimental_per_replica_buffer_size=buffer_size)
    iterator = iter(DistributedDataset(loader, cpu_slots(2), options))
    next(iterator)

    assert bool(input_threads()) is is_read_ahead
    iterator.close()


def test_random_transforms_interleave_with_training_as_in_plain_iteration() -> None:
    def collate(rows: list[int]) -> torch.Tensor:
        return torch.rand(len(rows))

    loader: DataLoader[Any] = DataLoader(range(8), batch_size=2, shuffle=True, collate_fn=collate)  # type: ignore[arg-type]

    torch.manual_seed(1)
    plain = [(*batch.tolist(), torch.rand(())) for batch in loader]
    torch.manual_seed(1)
    dealt = [
        (*torch.cat(element.values).tolist(), torch.rand(()))
        for element in DistributedDataset(loader, cpu_slots(2))
    ]

    assert dealt == plain
