import functools
from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from unisono import Mirrored, PerReplica
from unisono.devices import cpu_slots
from unisono.errors import ReplicaMismatchError
from unisono.values import flatten, map_leaves, regroup, select_replica


def regrouped(*structures: Any) -> Any:
    return regroup(structures, cpu_slots(len(structures)))


def test_leaves_of_the_replicas_become_one_per_replica_value() -> None:
    grouped = regrouped({"a": 1, "b": [2]}, {"a": 10, "b": [20]})

    assert grouped["a"].values == (1, 10)
    assert grouped["b"][0].values == (2, 20)
    assert grouped["a"].devices == cpu_slots(2)


def test_what_is_one_object_on_every_replica_is_not_wrapped() -> None:
    tensor = torch.ones(2)

    grouped = regrouped((tensor, None, "same"), (tensor, None, "same"))

    assert grouped[0] is tensor
    assert grouped[1:] == (None, "same")


def test_equal_tensors_are_not_one_object() -> None:
    grouped = regrouped(torch.ones(2), torch.ones(2))

    assert isinstance(grouped, PerReplica)


def test_one_object_on_some_replicas_is_wrapped() -> None:
    tensor = torch.ones(2)

    grouped = regrouped(tensor, tensor, torch.zeros(2))

    assert [component.sum().item() for component in grouped.values] == [2, 2, 0]


def test_a_single_replica_is_never_wrapped() -> None:
    tensor = torch.ones(2)

    assert regrouped([tensor, 5]) == [tensor, 5]


@pytest.mark.parametrize(
    ("other", "spelled"),
    [
        ([1, 2, 3], r"\[\*, \*, \*\], but replica 0 returned \[\*, \*\]"),
        ((1, 2), r"\(\*, \*\), but replica 0 returned \[\*, \*\]"),
    ],
)
def test_another_structure_names_the_replica(other: Any, spelled: str) -> None:
    with pytest.raises(ReplicaMismatchError, match=f"Replica 2 returned.*{spelled}"):
        regrouped([1, 2], [10, 20], other)


def test_dicts_with_other_keys_are_another_structure() -> None:
    with pytest.raises(ReplicaMismatchError, match="Replica 1"):
        regrouped({"a": 1}, {"b": 1})


def test_a_replica_gets_its_component_of_every_distributed_value() -> None:
    structure = {"a": PerReplica((1, 10)), "b": [Mirrored((2, 2)), 5]}

    assert select_replica(0, structure) == {"a": 1, "b": [2, 5]}
    assert select_replica(1, structure) == {"a": 10, "b": [2, 5]}


def test_what_is_not_distributed_is_the_same_for_every_replica() -> None:
    tensor = torch.ones(2)

    assert select_replica(3, (tensor,))[0] is tensor


def test_a_value_for_fewer_replicas_names_the_replica_without_one() -> None:
    with pytest.raises(ReplicaMismatchError, match="1 values has none for replica 1"):
        select_replica(1, PerReplica((1,)))


def test_selecting_undoes_regrouping() -> None:
    structures = ({"a": (1, [2])}, {"a": (10, [20])}, {"a": (100, [200])})

    grouped = regrouped(*structures)

    assert tuple(select_replica(i, grouped) for i in range(3)) == structures


def test_a_distributed_value_is_one_leaf() -> None:
    value = PerReplica(([1, 2], [3, 4]))

    leaves, rebuild = flatten([value, {"x": 5}])

    assert leaves == [value, 5]
    assert rebuild(["a", "b"]) == ["a", {"x": "b"}]
    assert map_leaves(type, [value]) == [PerReplica]


@dataclass
class Batch:
    x: Any
    y: Any = None

    @functools.cached_property
    def total(self) -> Any:
        return sum(self.x)


@dataclass(frozen=True)
class Frozen:
    x: Any


class Encoding(UserDict):  # type: ignore[type-arg]
    """Has attributes beside its entries, and makes its entries attributes."""

    def __init__(self, data: dict[str, Any], language: str) -> None:
        super().__init__(data)
        self.language = language

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Names(list[Any]):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda x: Batch(x),
        lambda x: Frozen(x),
        lambda x: {"x": Batch([x], (x,))},
        lambda x: OrderedDict(b=x, a=x),
        lambda x: defaultdict(list, a=x),
        lambda x: Encoding({"ids": x}, "German"),
        lambda x: Names([x, x]),
        lambda x: deque([x]),
        lambda x: torch.return_types.max((torch.tensor(x), torch.tensor(x))),
    ],
)
def test_other_containers_are_opened_and_put_together_again(make: Any) -> None:
    grouped = regrouped(make(1), make(2))

    assert type(grouped) is type(make(1))
    assert any(isinstance(leaf, PerReplica) for leaf in flatten(grouped)[0])
    for replica_id in range(2):
        assert repr(select_replica(replica_id, grouped)) == repr(make(replica_id + 1))


def test_attributes_of_a_mapping_stay() -> None:
    grouped = regrouped(Encoding({"ids": 1}, "German"), Encoding({"ids": 2}, "German"))

    assert grouped.ids.values == (1, 2)
    assert select_replica(1, grouped).language == "German"


def test_what_a_dataclass_has_computed_from_its_fields_is_computed_again() -> None:
    whole = Batch(PerReplica(([1, 2], [3])))
    whole.__dict__["total"] = 6

    assert [select_replica(i, whole).total for i in range(2)] == [3, 3]


@pytest.mark.parametrize("make", [Batch, Frozen, lambda x: Encoding({"x": x}, "")])
def test_what_has_no_distributed_value_in_it_is_one_object_on_all_replicas(make: Any) -> None:
    settings = make([1, 2])

    assert select_replica(1, (settings,))[0] is settings


def test_what_is_one_object_on_all_replicas_stays_one() -> None:
    settings = Batch([1, 2])

    assert regrouped((1, settings), (2, settings))[1] is settings


def test_what_holds_itself_is_not_opened_for_ever() -> None:
    first, second = Batch(1), Batch(2)
    first.y, second.y = first, second

    assert regrouped(first, second).x.values == (1, 2)
    assert select_replica(0, first) is first


def test_what_is_registered_with_torch_is_opened_as_it_says() -> None:
    grouped = regrouped(Registered(1, "a"), Registered(2, "a"))

    assert (grouped.content.values, grouped.label) == ((1, 2), "a")
    assert select_replica(1, grouped).content == 2


class Registered:
    def __init__(self, content: Any, label: str) -> None:
        self.content, self.label = content, label


pytree.register_pytree_node(
    Registered,
    lambda one: ([one.content], one.label),
    lambda items, label: Registered(next(iter(items)), str(label)),
)
