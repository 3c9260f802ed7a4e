import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from unisono.devices import cpu_slots
from unisono.input import AutoShardPolicy, DistributedDataset, InputOptions
from unisono.input.distributed_input import DistributedInput
from unit.input.parts import own_samples
from unit.input.resumable import MAKERS, Noisy, from_function, loader, split_over_two

# From Python 3.12 on, starting workers by fork warns once torch has its own threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


class Training:
    """A loop that draws random numbers itself, and can be saved in the middle of a pass."""

    def __init__(self, dataset: DistributedInput) -> None:
        self.dataset = dataset
        self.seen: list[Any] = []
        self.saved = b""

    def run(self, num_passes: int, save_at: int | None = None) -> list[Any]:
        for _ in range(num_passes):
            for element in self.dataset:
                parts = [part.tolist() for part in element.values]
                self.seen.append((parts, torch.rand(()).item(), random.random()))
                if len(self.seen) == save_at:
                    self.saved = self.checkpoint()
        return self.seen

    def checkpoint(self) -> bytes:
        file = io.BytesIO()
        state = {
            "input": self.dataset.state_dict(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index]
            "position": np.random.get_state()[2],  # type: ignore[index]
        }
        torch.save(state, file)
        return file.getvalue()

    def restore(self, saved: bytes) -> None:
        state = torch.load(io.BytesIO(saved), weights_only=True)
        self.dataset.load_state_dict(state["input"])
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        words = np.array(state["numpy"], dtype=np.uint32)
        np.random.set_state(("MT19937", words, state["position"], 0, 0.0))


def start_anew(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@pytest.mark.parametrize("save_at", [1, 4, 8])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_resumed_pass_and_the_next_give_the_same_bits(kind: str, save_at: int) -> None:
    start_anew(1)
    whole = Training(MAKERS[kind]())
    expected = whole.run(num_passes=3, save_at=save_at)[save_at:]

    start_anew(99)
    resumed = Training(MAKERS[kind]())
    resumed.restore(whole.saved)

    assert resumed.run(num_passes=3)[: len(expected)] == expected


@pytest.mark.parametrize("kind", ["shuffled", "own generator", "workers"])
def test_a_pass_can_be_resumed_twice(kind: str) -> None:
    start_anew(1)
    whole = Training(MAKERS[kind]())
    expected = whole.run(num_passes=1, save_at=2)
    again = Training(MAKERS[kind]())
    again.restore(whole.saved)
    again.run(num_passes=1, save_at=2)

    last = Training(MAKERS[kind]())
    last.restore(again.saved)

    assert last.run(num_passes=1) == expected[4:]


@pytest.mark.parametrize("save_at", [3, 9])
def test_workers_that_persist_resume_in_the_first_pass_and_the_second(save_at: int) -> None:
    # Six steps a pass; the workers' own random numbers go on from pass to pass, so without noise.
    def make() -> DistributedDataset:
        return split_over_two(
            DataLoader(
                range(11),  # type: ignore[arg-type]
                batch_size=2,
                shuffle=True,
                num_workers=2,
                persistent_workers=True,
            )
        )

    start_anew(1)
    whole = Training(make())
    expected = whole.run(num_passes=3, save_at=save_at)[save_at:]
    resumed = Training(make())
    resumed.restore(whole.saved)

    assert resumed.run(num_passes=3 - save_at // 6) == expected


@pytest.mark.parametrize("save_at", [3, 9])
def test_workers_that_persist_resume_where_they_run_already(save_at: int) -> None:
    def make() -> DistributedDataset:
        numbers: Any = range(11)
        kinds: Any = {"shuffle": True, "num_workers": 1, "persistent_workers": True}
        return split_over_two(DataLoader(numbers, batch_size=2, **kinds))

    start_anew(1)
    whole = Training(make())
    expected = whole.run(num_passes=3, save_at=save_at)[save_at:]
    resumed = Training(make())
    next(iter(resumed.dataset))
    resumed.restore(whole.saved)

    assert resumed.run(num_passes=3 - save_at // 6) == expected


@given(st.integers(0, 5), st.integers(1, 4), st.integers(0, 3))
def test_a_saved_and_a_resumed_pass_hold_each_sample_once(
    num_steps: int, num_replicas: int, buffer_size: int
) -> None:
    options = InputOptions(experimental_per_replica_buffer_size=buffer_size)

    def make() -> DistributedDataset:
        source: DataLoader[int] = DataLoader(list(range(11)), batch_size=2, shuffle=True)  # type: ignore[arg-type]
        return DistributedDataset(source, cpu_slots(num_replicas), options)

    def samples(element: Any) -> list[int]:
        parts = (element,) if num_replicas == 1 else own_samples(element)
        return [int(sample) for part in parts for sample in part]

    first = iter(make())
    seen = [sample for _ in range(num_steps) for sample in samples(next(first))]
    second = make()
    second.load_state_dict(first.state_dict())
    first.close()
    seen += [sample for element in second for sample in samples(element)]

    assert sorted(seen) == list(range(11))


def test_resuming_fetches_nothing_that_was_consumed() -> None:
    iterator = iter(split_over_two(loader(shuffle=True)))
    consumed = [int(i) for _ in range(3) for part in next(iterator).values for i, _ in part]
    source = Noisy()

    resumed = split_over_two(loader(source, shuffle=True))
    resumed.load_state_dict(iterator.state_dict())
    list(resumed)

    assert sorted(source.fetched) == sorted(set(range(11)) - set(consumed))


def test_workers_can_be_told_to_fetch_nothing_again() -> None:
    def make() -> DistributedDataset:
        return split_over_two(
            DataLoader(range(11), batch_size=2, shuffle=True, num_workers=2)  # type: ignore[arg-type]
        )

    iterator = iter(make())
    next(iterator)
    state = iterator.state_dict()
    expected = [[part.tolist() for part in element.values] for element in iterator]

    resumed = make()
    resumed.load_state_dict(state, refetch=False)

    assert [[part.tolist() for part in element.values] for element in resumed] == expected


@pytest.mark.parametrize("kind", MAKERS)
def test_resuming_leaves_the_global_generators_alone(kind: str) -> None:
    iterator = iter(MAKERS[kind]())
    next(iterator)
    resumed = MAKERS[kind]()
    resumed.load_state_dict(iterator.state_dict())
    iterator.close()

    start_anew(7)
    expected = torch.rand(()), random.random(), np.random.random()
    start_anew(7)
    resumed_iterator = iter(resumed)

    assert (torch.rand(()), random.random(), np.random.random()) == expected
    resumed_iterator.close()


def test_random_numbers_drawn_between_opening_and_the_first_step_change_nothing() -> None:
    iterator = iter(split_over_two(loader(shuffle=True)))
    torch.rand(3)
    next(iterator)
    state = iterator.state_dict()
    expected = [[part[:, 0].tolist() for part in element.values] for element in iterator]

    resumed = split_over_two(loader(shuffle=True))
    resumed.load_state_dict(state)

    assert [[p[:, 0].tolist() for p in element.values] for element in resumed] == expected


def test_what_was_fetched_ahead_does_not_count_as_consumed() -> None:
    dataset = split_over_two(list(torch.arange(12).split(2)), buffer_size=4)
    iterator = iter(dataset)
    next(iterator)

    assert dataset.state_dict()["num_steps"] == 1
    iterator.close()


def test_an_iterator_can_be_sent_back() -> None:
    iterator = iter(split_over_two(loader(shuffle=True)))
    next(iterator)
    state = iterator.state_dict()
    rest = [element.values[0][:, 0].tolist() for element in iterator]

    iterator.load_state_dict(state)

    assert [element.values[0][:, 0].tolist() for element in iterator] == rest


def test_a_finished_pass_resumes_as_a_new_one() -> None:
    dataset = split_over_two(loader())
    list(dataset)

    resumed = split_over_two(loader())
    resumed.load_state_dict(dataset.state_dict())

    assert len(list(resumed)) == 6


def test_saved_after_the_last_step_the_pass_ends_at_once() -> None:
    dataset = split_over_two(loader(shuffle=True))
    iterator = iter(dataset)
    for _ in range(6):
        next(iterator)

    resumed = split_over_two(loader(shuffle=True))
    resumed.load_state_dict(dataset.state_dict())

    assert list(resumed) == []
    assert len(list(resumed)) == 6


def test_a_loaded_state_is_given_back_until_it_is_used() -> None:
    iterator = iter(split_over_two(loader()))
    next(iterator)
    resumed = split_over_two(loader())
    resumed.load_state_dict(iterator.state_dict())

    assert resumed.state_dict()["num_steps"] == 1


def test_fixed_sizes_are_those_of_the_pass_that_was_saved() -> None:
    batches = list(torch.arange(14).split(8))

    def make() -> DistributedDataset:
        options = InputOptions(auto_shard_policy=AutoShardPolicy.OFF, split="tensorflow")
        return DistributedDataset(batches, cpu_slots(2), options)

    iterator = iter(make())
    next(iterator)
    resumed = make()
    resumed.load_state_dict(iterator.state_dict())

    assert [part.tolist() for part in next(iter(resumed)).values] == [[8, 9, 10, 11], [12, 13]]


def test_a_pass_that_was_saved_after_an_odd_rest_has_nothing_left() -> None:
    batches = [torch.arange(2)] * 3
    iterator = iter(from_function(batches))
    assert [next(iterator).counts for _ in range(2)] == [(2, 2), (2, 0)]
    resumed = from_function(batches)
    resumed.load_state_dict(iterator.state_dict())

    assert list(resumed) == []
