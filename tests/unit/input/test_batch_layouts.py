"""Batches whose samples do not lie in the first dimension of every tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import unisono as uo
from unisono.devices import cpu_slots
from unisono.errors import UnsupportedError
from unisono.input import DistributedDataset, DistributedDatasetsFromFunction, InputContext
from unisono.values import select_replica


def steps(source: Any, num_replicas: int = 2, **options: Any) -> list[list[Any]]:
    """What the code on each replica sees, step by step."""
    dataset = DistributedDataset(source, cpu_slots(num_replicas), uo.InputOptions(**options))
    return [[select_replica(i, element) for i in range(num_replicas)] for element in dataset]


class Sequences(NamedTuple):
    tokens: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class Graph:
    """A batch of graphs: nodes, pairs of nodes, and a label for each graph."""

    nodes: Tensor
    edges: Tensor
    labels: Tensor

    @property
    def num_graphs(self) -> int:
        return len(self.labels)


class Opaque:
    """A batch that nobody can look into."""

    def __init__(self, *graphs: int) -> None:
        self.graphs = graphs


def detection(num_samples: int, *, same_size: bool = False) -> list[Any]:
    """Samples as torchvision's detection models take them."""
    sizes = [(3, 4, 4 if same_size else 4 + i) for i in range(num_samples)]
    return [
        (torch.full(size, float(i)), {"boxes": torch.zeros(i, 4), "id": torch.tensor(i)})
        for i, size in enumerate(sizes)
    ]


def tuples(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


def lists(samples: list[Any]) -> Any:
    return [list(column) for column in zip(*samples, strict=True)]


def test_batches_with_time_first_are_split_along_the_second_dimension() -> None:
    batch = torch.arange(12).view(4, 3)

    ((first, second),) = steps([batch], batch_dim=1)

    assert torch.equal(first, batch[:, :2])
    assert torch.equal(second, batch[:, 2:])


@pytest.mark.parametrize("dims", [(1, 0), [-1, -1], Sequences(1, 0)], ids=str)  # type: ignore[arg-type]
def test_each_leaf_may_have_its_own_batch_dimension(dims: Any) -> None:
    batch = Sequences(torch.arange(12).view(4, 3), torch.tensor([4, 2, 3]))

    if not isinstance(dims, Sequences):
        batch = tuple(batch)  # type: ignore[assignment]
    ((first, second),) = steps([batch], batch_dim=dims)

    assert (tuple(first[0].shape), first[1].tolist()) == ((4, 2), [4, 2])
    assert (tuple(second[0].shape), second[1].tolist()) == ((4, 1), [3])


def test_none_gives_all_of_a_leaf_to_every_replica() -> None:
    batch = {"x": torch.arange(4), "table": {"a": torch.zeros(7), "b": torch.zeros(3)}}

    ((first, second),) = steps([batch], batch_dim={"x": 0, "table": None})

    assert (first["x"].tolist(), second["x"].tolist()) == ([0, 1], [2, 3])
    assert len(first["table"]["a"]) == len(second["table"]["a"]) == 7


@pytest.mark.parametrize(
    ("dims", "problem"),
    [
        (2, r"\[1\] has the shape \(3,\)"),
        ((1, 0, 0), r"structure like the batch, got \(1, 0, 0\) for a batch of type tuple"),
        ({"x": 1}, "structure like the batch"),
        ((0, 0), r"\[0\] has 4, \[1\] has 3"),
    ],
    ids=str,
)
def test_a_batch_dimension_that_does_not_fit_is_refused(dims: Any, problem: str) -> None:
    with pytest.raises(UnsupportedError, match=problem):
        steps([(torch.zeros(4, 3, 5), torch.zeros(3))], batch_dim=dims)


@pytest.mark.parametrize("wrong", ["1", 1.0, (0, "x"), True], ids=repr)
def test_a_batch_dimension_that_is_no_number_is_refused(wrong: Any) -> None:
    with pytest.raises(UnsupportedError, match="`batch_dim` must be an int"):
        uo.InputOptions(batch_dim=wrong)


@pytest.mark.parametrize("wrong", ["odd", None, 3], ids=repr)
def test_a_split_that_is_not_known_is_refused(wrong: Any) -> None:
    with pytest.raises(UnsupportedError, match='`split` must be "even", "tensorflow" or a func'):
        uo.InputOptions(split=wrong)
    with pytest.raises(UnsupportedError, match="`count_samples` must be a function"):
        uo.InputOptions(count_samples=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("collate", [tuples, lists])
@pytest.mark.parametrize("same_size", [False, True])
def test_lists_of_images_and_their_boxes_are_split_by_sample(
    collate: Callable[[list[Any]], Any], same_size: bool
) -> None:
    samples: Any = detection(5, same_size=same_size)
    loader = DataLoader(samples, batch_size=3, collate_fn=collate)

    full, rest = steps(loader)

    assert [[int(image[0, 0, 0]) for image in images] for images, _ in full] == [[0, 1], [2]]
    assert [[int(one["id"]) for one in targets] for _, targets in full] == [[0, 1], [2]]
    assert [[int(one["id"]) for one in targets] for _, targets in rest] == [[3], [4]]
    assert [[len(one["boxes"]) for one in targets] for _, targets in rest] == [[3], [4]]


def test_lists_of_images_alone_are_split_by_sample_if_the_loader_has_as_many() -> None:
    images: Any = [torch.full((3, 4, 4), float(i)) for i in range(7)]
    loader = DataLoader(images, batch_size=4, collate_fn=list)

    full, rest = steps(loader)

    assert [[int(image[0, 0, 0]) for image in part] for part in full] == [[0, 1], [2, 3]]
    assert [[int(image[0, 0, 0]) for image in part] for part in rest] == [[4, 5], [6]]


def test_a_list_of_tensors_that_are_batches_is_split_along_each() -> None:
    views = [torch.arange(3.0).view(3, 1, 1).expand(3, 4, 4) for _ in range(2)]
    samples: Any = list(zip(*views, strict=True))

    for source in (DataLoader(samples, batch_size=3), [views], [tuple(views)]):
        ((first, second),) = steps(source)
        assert [len(one) for one in first] == [2, 2]
        assert [one[0, 0, 0].item() for one in second] == [2.0, 2.0]


def test_a_list_that_can_be_read_in_two_ways_is_refused() -> None:
    images = [torch.zeros(3, 4, 4), torch.zeros(3, 5, 5)]

    with pytest.raises(UnsupportedError, match="in two ways: one sample per entry, or 3 samples"):
        steps([images])
    assert [len(part[0]) for part in steps([images], batch_dim=0)[0]] == [2, 1]


def test_lists_that_do_not_agree_are_refused_with_the_way_out() -> None:
    with pytest.raises(UnsupportedError, match=r"split batches yourself with `InputOptions\(split"):
        steps([([torch.zeros(2, 3), torch.zeros(4, 3)], torch.zeros(7))])


def split_graph(batch: Graph, num_replicas: int) -> list[Graph | None]:
    """Each graph has two nodes and an edge between them."""
    parts: list[Graph | None] = []
    for own in torch.arange(batch.num_graphs).tensor_split(num_replicas):
        first = int(own[0]) if len(own) else 0
        nodes = batch.nodes[2 * first : 2 * (first + len(own))]
        edges = batch.edges[:, first : first + len(own)] - 2 * first
        parts.append(Graph(nodes, edges, batch.labels[own]) if len(own) else None)
    return parts


def graphs(count: int) -> Graph:
    edges = torch.arange(2 * count).view(count, 2).T
    return Graph(torch.arange(2.0 * count), edges, torch.arange(count))


def test_a_function_of_the_user_splits_graphs() -> None:
    options: dict[str, Any] = {"split": split_graph, "count_samples": lambda part: part.num_graphs}

    ((first, second),) = steps([graphs(3)], **options)

    assert isinstance(first, Graph)
    assert (first.nodes.tolist(), first.labels.tolist()) == ([0, 1, 2, 3], [0, 1])
    assert (second.edges.tolist(), second.labels.tolist()) == ([[0], [1]], [2])

    dataset = DistributedDataset([graphs(2)], cpu_slots(3), uo.InputOptions(**options))
    (element,) = dataset
    assert element.labels.counts == (1, 1, 0)
    assert select_replica(2, element).labels.tolist() == [0]
    assert steps([graphs(2)], 1, **options)[0][0].num_graphs == 2


def test_parts_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="Give `InputOptions` a function `count_samples`"):
        steps([graphs(4)], split=split_graph)


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (lambda batch, n: [batch], "list of 2 parts, .* got 1 parts"),
        (lambda batch, n: batch, "list of 2 parts, .* got <class 'torch.Tensor'>"),
        (lambda batch, n: [None, None], "only None"),
    ],
)
def test_a_function_that_returns_no_part_per_replica_is_refused(made: Any, problem: str) -> None:
    with pytest.raises(UnsupportedError, match=problem):
        steps([torch.arange(4)], split=made)


@pytest.mark.parametrize("wrong", [-1, "3", None])
def test_a_count_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"number of samples of a batch, got {wrong!r}"):
        steps([torch.arange(4)], split=lambda x, n: x.chunk(n), count_samples=lambda _: wrong)


def test_a_function_may_return_lists_of_different_lengths_and_objects() -> None:
    def split(batch: list[Any], num_replicas: int) -> list[list[Any]]:
        return [batch[i::num_replicas] for i in range(num_replicas)]

    ((first, second),) = steps([[Opaque(1), Opaque(2), Opaque(3)]], split=split)

    assert [one.graphs for one in first] == [(1,), (3,)]
    assert [one.graphs for one in second] == [(2,)]


def test_batches_that_a_function_makes_may_be_counted_by_another() -> None:
    options = uo.InputOptions(count_samples=lambda batch: len(batch["labels"]))
    batches = [
        {"nodes": torch.zeros(7), "labels": torch.zeros(3)},
        {"nodes": torch.zeros(4), "labels": torch.zeros(1)},
    ]
    context = InputContext(num_replicas_in_sync=2)

    (element,) = DistributedDatasetsFromFunction(lambda _: batches, context, cpu_slots(2), options)

    assert element["nodes"].counts == (3, 1)


def test_lists_of_different_lengths_may_be_made_by_a_function() -> None:
    batches = [tuples(detection(2)), tuples(detection(3))]
    context = InputContext(num_replicas_in_sync=2)

    (element,) = DistributedDatasetsFromFunction(lambda _: batches, context, cpu_slots(2))

    images, targets = element
    assert [len(part) for part in images.values] == [2, 3]
    assert targets.counts == (2, 3)
