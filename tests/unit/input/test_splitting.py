from collections import OrderedDict, UserDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from unisono.devices import cpu_slots
from unisono.errors import ReplicaMismatchError, UnsupportedError
from unisono.input import InputOptions, counts_of
from unisono.input.split.splitter import MISSING, Splitter
from unisono.values import PerReplica, select_replica


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Sample:
    x: Tensor
    name: list[str]


TENSORFLOW = InputOptions(split="tensorflow")


def dealt(batch: Any, num_replicas: int = 2) -> Any:
    return Splitter(TENSORFLOW).split(batch, num_replicas).distributed(cpu_slots(num_replicas))


def by_replica(batch: Any, num_replicas: int = 2) -> list[Any]:
    return [select_replica(i, dealt(batch, num_replicas)) for i in range(num_replicas)]


def test_parts_are_views_of_the_batch() -> None:
    batch = torch.arange(6)

    first, second = by_replica(batch)
    batch += 10

    assert first.tolist() == [10, 11, 12]
    assert second.tolist() == [13, 14, 15]


def test_parts_of_an_array_share_its_memory() -> None:
    batch = np.arange(4.0)

    first, _ = by_replica(batch)
    batch += 1

    assert first.tolist() == [1, 2]


def test_an_empty_part_has_the_dtype_and_the_other_dimensions() -> None:
    _, empty = by_replica(torch.zeros(1, 3, 2, dtype=torch.float16))

    assert empty.shape == (0, 3, 2)
    assert empty.dtype is torch.float16


def test_containers_keep_their_type() -> None:
    x = torch.arange(2)
    batch = [{"a": x}, (x, x), Pair(x, x), OrderedDict(b=x), []]

    first, _ = by_replica(batch)

    assert [type(item) for item in first] == [dict, tuple, Pair, OrderedDict, list]
    assert first[0]["a"].tolist() == first[1][1].tolist() == first[2].y.tolist() == [0]


def test_a_dataclass_is_taken_apart_and_put_together_on_each_replica() -> None:
    batch = Sample(torch.arange(3), ["a", "b", "c"])

    assert dealt(batch).name.values == (["a", "b"], ["c"])
    first, second = by_replica(batch)
    assert (first.x.tolist(), first.name) == ([0, 1], ["a", "b"])
    assert (second.x.tolist(), second.name) == ([2], ["c"])


class Encoding(dict[str, Any]):
    """A mapping with something beside its entries."""

    language = "none"


@pytest.mark.parametrize("kind", [UserDict, Encoding, OrderedDict])
def test_another_mapping_is_taken_apart_and_put_together_on_each_replica(kind: Any) -> None:
    batch = kind({"x": torch.arange(2)})
    batch.language = "German"

    assert isinstance(dealt(batch)["x"], PerReplica)
    first, second = by_replica(batch)
    assert (first["x"].tolist(), second["x"].tolist()) == ([0], [1])
    assert type(first) is kind
    assert first.language == "German"
    assert batch["x"].tolist() == [0, 1]


def test_a_mapping_that_cannot_be_changed_becomes_a_dict() -> None:
    first, second = by_replica(MappingProxyType({"x": torch.arange(2)}))

    assert (first["x"].tolist(), second["x"].tolist()) == ([0], [1])


@pytest.mark.parametrize(
    "column",
    [
        ["a", "b", "c"],
        ("a", "b", "c"),
        [1, 2, 3],
        (1.0, 2.0, 3.0),
        [[1], [2, 2], []],
        [{"id": "a"}, {"id": "b"}, {"id": "c"}],
        ["a", None, "c"],
        np.array(["a", "b", "c"]),
        [object(), object(), object()],
    ],
    ids=lambda column: f"{type(column).__name__} of {type(column[0]).__name__}",
)
def test_a_list_without_tensors_is_sliced(column: Any) -> None:
    first, second = by_replica((torch.arange(3), column))

    assert list(first[1]) == list(column[:2])
    assert list(second[1]) == list(column[2:])


def test_what_default_collate_makes_of_text_is_several_columns() -> None:
    batch = torch.utils.data.default_collate([("a", "x"), ("b", "y")])

    assert by_replica(batch) == [[("a",), ("x",)], [("b",), ("y",)]]


def test_numbers_text_and_none_are_given_to_every_replica() -> None:
    whole_leaves = {"n": 3, "text": "abc", "none": None, "nones": (None, None)}

    first, second = by_replica({"x": torch.arange(2), **whole_leaves})

    for part in first, second:
        del part["x"]
        assert part == whole_leaves


def test_none_is_not_wrapped() -> None:
    assert dealt((torch.arange(2), None))[1] is None


def test_a_scalar_tensor_is_given_to_every_replica() -> None:
    first, second = by_replica((torch.arange(2), torch.tensor(5), np.array(6)))

    assert [int(x) for x in (*first[1:], *second[1:])] == [5, 6, 5, 6]


def test_leaves_that_disagree_are_named_with_their_sizes() -> None:
    batch = {"x": torch.zeros(4, 2), "y": [torch.zeros(3)], "z": Pair(*torch.zeros(2, 4))}

    with pytest.raises(ValueError, match=r"\['x'\] has 4, \['y'\]\[0\] has 3, \['z'\]\.x has 4"):
        dealt(batch)


def test_a_column_that_disagrees_is_named_too() -> None:
    with pytest.raises(UnsupportedError, match=r"\[0\] has 4, \[1\] has 2"):
        dealt((torch.zeros(4), (224, 224)))


@pytest.mark.parametrize("scalar", [3, torch.tensor(3), "abc", None])
def test_an_element_without_a_batch_dimension_cannot_be_split(scalar: Any) -> None:
    with pytest.raises(UnsupportedError, match="no batch dimension"):
        dealt(scalar)


def test_a_container_that_is_not_known_is_refused_rather_than_given_to_all() -> None:
    with pytest.raises(UnsupportedError, match=r"split \[1\], a set"):
        dealt([torch.arange(2), {1, 2}])


def test_one_replica_gets_anything_and_arrays_as_tensors() -> None:
    parts = Splitter().whole({"x": np.arange(3), "odd": {1, 2}})

    assert isinstance(parts.leaves[0][0], Tensor)
    assert parts.leaves[1] == ({1, 2},)
    assert parts.counts == (3,)


def test_a_sparse_batch_is_split_along_its_first_dimension() -> None:
    batch = torch.eye(3).to_sparse()

    first, second = by_replica(batch)

    assert torch.equal(first.to_dense(), torch.eye(3)[:2])
    assert torch.equal(second.to_dense(), torch.eye(3)[2:])


def test_batches_of_different_structure_are_not_joined() -> None:
    with pytest.raises(ReplicaMismatchError, match=r"replica 1 holds \['b'\], .* 0 holds \['a'\]"):
        Splitter().join([{"a": 1}, {"b": 1}])


def test_an_empty_batch_keeps_structure_and_scalars() -> None:
    empty = Splitter(TENSORFLOW).spare({"x": torch.zeros(2, 3), "names": ["a", "b"], "n": 4})

    assert (empty["x"].shape, empty["names"], empty["n"]) == ((0, 3), [], 4)
    assert Splitter(TENSORFLOW).spare({"n": 4, "t": torch.tensor(1)}) is MISSING


def test_a_sample_that_is_lent_keeps_structure_and_scalars() -> None:
    batch: dict[str, Any] = {"x": torch.arange(2), "names": ["a", "b"], "n": 4}

    lent = Splitter().spare(batch)
    lent["x"] += 5

    assert (batch["x"].tolist(), lent["names"], lent["n"]) == ([0, 1], ["a"], 4)


@pytest.mark.parametrize(
    ("structure", "counts"),
    [
        (PerReplica([torch.zeros(3), torch.zeros(2)]), (3, 2)),
        ([PerReplica([torch.zeros(1), torch.zeros(0)])], (1, 0)),
        ({"a": PerReplica([["x"], []]), "b": None, "c": 4}, (1, 0)),
        ((PerReplica([torch.zeros(2)] * 2), PerReplica([1, 1])), (2, 2)),
        ((PerReplica([torch.zeros(2)] * 2), PerReplica([torch.zeros(1)] * 2)), None),
        (PerReplica([torch.tensor(1), torch.tensor(2)]), None),
        ((torch.zeros(3), torch.tensor(1.0)), (3,)),
        (5, None),
        (PerReplica([Sample(torch.zeros(2), ["a", "b"]), Sample(torch.zeros(0), [])]), (2, 0)),
    ],
    ids=str,
)
def test_counts_are_read_where_all_leaves_agree(
    structure: Any, counts: tuple[int, ...] | None
) -> None:
    assert counts_of(structure) == counts


def odd_layout(kind: str) -> Tensor:
    if kind == "csr":
        return torch.eye(3).to_sparse_csr()
    layout = torch.jagged if kind == "jagged" else torch.strided
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


@pytest.mark.filterwarnings("ignore:.*(beta|prototype).*:UserWarning")
@pytest.mark.parametrize("kind", ["nested", "jagged", "csr"])
def test_a_tensor_that_cannot_be_split_is_refused_by_its_path(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=r"Cannot split \['x'\].*collate_fn"):
        Splitter().split({"x": odd_layout(kind)}, 2)
