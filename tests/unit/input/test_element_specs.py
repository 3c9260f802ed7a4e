"""The elements of a distributed dataset are described before one is drawn."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from unisono.devices import cpu_slots
from unisono.errors import UnsupportedError
from unisono.input import DistributedDataset, InputOptions, TensorSpec, numpy_dataset
from unisono.values import PerReplica, map_leaves


def distributed(source: Any, num_replicas: int, **settings: Any) -> DistributedDataset:
    return DistributedDataset(source, cpu_slots(num_replicas), **settings)


def test_leaves_are_per_replica_values() -> None:
    loader = DataLoader(numpy_dataset({"x": np.zeros((4, 2)), "y": np.arange(4)}), batch_size=4)

    (element,) = distributed(loader, 2)

    assert isinstance(element["x"], PerReplica)
    assert [part.tolist() for part in element["y"].values] == [[0, 1], [2, 3]]


def tensor_specs(spec: Any) -> Any:
    return map_leaves(lambda leaf: leaf.values if isinstance(leaf, PerReplica) else leaf, spec)


SAMPLES = TensorDataset(torch.zeros(7, 3), torch.zeros(7, dtype=torch.int64))


def test_elements_are_described_before_one_is_drawn() -> None:
    before = torch.get_rng_state()
    dataset = DistributedDataset(DataLoader(SAMPLES, batch_size=4, shuffle=True), cpu_slots(2))

    features, labels = dataset.element_spec

    assert features.values == (TensorSpec((None, 3), torch.float32),) * 2
    assert labels.values == (TensorSpec((None,), torch.int64),) * 2
    assert torch.equal(torch.get_rng_state(), before)
    assert tensor_specs(iter(dataset).element_spec) == tensor_specs(dataset.element_spec)


def test_one_replica_has_bare_specs() -> None:
    batches = [{"x": torch.zeros(4, 2), "name": "a", "n": np.zeros(4)}]

    spec = DistributedDataset(batches, cpu_slots(1)).element_spec

    expected = TensorSpec((None, 2), torch.float32), str, TensorSpec((None,), torch.float64)
    assert (spec["x"], spec["name"], spec["n"]) == expected


@pytest.mark.parametrize(("batch_size", "size"), [(4, 2), (3, None)])
def test_batches_that_are_always_full_have_a_known_size(batch_size: int, size: int | None) -> None:
    loader = DataLoader(SAMPLES, batch_size, drop_last=True)

    features, _ = DistributedDataset(loader, cpu_slots(2)).element_spec

    assert features.values[0].shape == (size, 3)


def test_input_that_comes_once_is_not_looked_at() -> None:
    dataset = DistributedDataset(iter([torch.zeros(2)]), cpu_slots(2))

    with pytest.raises(UnsupportedError, match="gives its batches only once"):
        _ = dataset.element_spec
    assert len(list(dataset)) == 1


def test_the_dimension_of_the_batch_may_be_another() -> None:
    options = InputOptions(batch_dim=1)
    dataset = DistributedDataset([torch.zeros(5, 4)], cpu_slots(2), options)

    assert dataset.element_spec.values[0].shape == (5, None)


def test_what_a_function_of_the_program_makes_is_not_known() -> None:
    options = InputOptions(split=lambda batch, num_parts: [batch] * num_parts)

    with pytest.raises(UnsupportedError, match="`split` function"):
        _ = DistributedDataset([torch.zeros(2)], cpu_slots(2), options).element_spec
