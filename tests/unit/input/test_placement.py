from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from unisono.devices import Device, cpu_slots
from unisono.input import DistributedDataset, InputOptions
from unisono.testing import virtual_gpus

BUSY_CYCLES = 20_000_000

# From Python 3.12 on, starting workers by fork warns once torch has its own threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def gpus(count: int) -> list[Device]:
    return [Device("cuda", i) for i in range(count)]


def test_parts_for_cpu_devices_stay_where_they_are() -> None:
    batch = torch.arange(4)

    (element,) = DistributedDataset([batch], cpu_slots(2))

    assert element.values[0].data_ptr() == batch.data_ptr()
    assert element.values[1].data_ptr() == batch[2:].data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("buffer_size", [0, 1, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_each_sample_arrives_on_a_gpu_once(
    buffer_size: int, num_workers: int, pin_memory: bool
) -> None:
    data = TensorDataset(torch.arange(103), torch.arange(103.0).repeat(1000, 1).T)
    loader = DataLoader(data, batch_size=8, num_workers=num_workers, pin_memory=pin_memory)
    options = InputOptions(experimental_per_replica_buffer_size=buffer_size)

    with virtual_gpus(3):
        seen: list[int] = []
        for index, rows in DistributedDataset(loader, gpus(3), options):
            assert all(part.is_cuda for part in (*index.values, *rows.values))
            for part, row in zip(index.values, rows.values, strict=True):
                assert torch.equal(row.sum(dim=1), part * 1000.0)
                seen += part.tolist()

    assert seen == list(range(103))


@pytest.mark.gpu
def test_a_busy_gpu_reads_what_was_copied_ahead_and_nothing_else() -> None:
    batches = [torch.full((1 << 18,), float(i)) for i in range(20)]
    options = InputOptions(experimental_per_replica_buffer_size=2)
    sums = []

    with virtual_gpus(2):
        for element in DistributedDataset(batches, gpus(2), options):
            torch.cuda._sleep(BUSY_CYCLES)
            sums.append([part.sum() for part in element.values])
            del element

    assert [[s.item() / (1 << 17) for s in step] for step in sums] == [[i, i] for i in range(20)]


@pytest.mark.gpu
def test_a_copy_that_is_under_way_is_waited_for() -> None:
    batch = torch.ones(1 << 25).pin_memory()

    with virtual_gpus(2):
        (element,) = DistributedDataset([batch], gpus(2))
        sums = [part.sum() for part in element.values]

    assert [int(s) for s in sums] == [1 << 24, 1 << 24]


@pytest.mark.gpu
def test_a_batch_that_is_still_being_made_on_the_gpu_is_waited_for() -> None:
    def batches() -> Any:
        for i in range(4):
            batch = torch.zeros(1 << 18, device="cuda")
            torch.cuda._sleep(BUSY_CYCLES)
            yield batch.add_(i)

    options = InputOptions(experimental_per_replica_buffer_size=2)

    # The reader makes its batches on the default stream, and this thread reads them on another.
    with virtual_gpus(2), torch.cuda.stream(torch.cuda.Stream()):
        dataset = DistributedDataset(batches(), gpus(2), options)
        smallest = [element.values[1].min() for element in dataset]

        assert [int(value) for value in smallest] == [0, 1, 2, 3]


@pytest.mark.gpu
def test_text_needs_no_gpu() -> None:
    with virtual_gpus(2):
        (element,) = DistributedDataset([(torch.zeros(1, 3), ["a"])], gpus(2))

    assert element[0].counts == (1, 0)
    assert all(part.shape == (1, 3) and part.is_cuda for part in element[0].values)
    assert element[1].values == (["a"], ["a"])


@pytest.mark.gpu
def test_what_is_not_fetched_stays_on_the_host() -> None:
    options = InputOptions(experimental_fetch_to_device=False)

    with virtual_gpus(2):
        (element,) = DistributedDataset([torch.arange(2)], gpus(2), options)

    assert element.devices == cpu_slots(2)
    assert not element.values[0].is_cuda
