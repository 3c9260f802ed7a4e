from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import Tensor

from unisono.packing import (
    BytesPerPack,
    NoPacking,
    NumPacks,
    PackingRule,
    PackLayout,
    Segment,
    SmallGroups,
    Spec,
    by_dtype,
    split_evenly,
)

RULES = [
    NoPacking(),
    *(NumPacks(n) for n in (1, 2, 3, 7, 100)),
    *(BytesPerPack(n) for n in (1, 8, 40, 10**6)),
    SmallGroups(12, 2),
    SmallGroups(1000, 100),
]
each_rule = pytest.mark.parametrize("rule", RULES, ids=str)


def mixed_tensors() -> list[Tensor]:
    return [
        torch.arange(3.0),
        torch.ones((1, 0)),
        torch.tensor(7, dtype=torch.int32),
        torch.arange(6.0).view(2, 3),
        torch.ones(0, dtype=torch.int32),
        torch.tensor(5.0),
        torch.arange(4, dtype=torch.int32),
        torch.tensor([1 + 2j]),
    ]


def specs_of(tensors: Sequence[Tensor]) -> list[Spec]:
    return [Spec.of(tensor) for tensor in tensors]


def test_a_spec_counts_elements_and_bytes() -> None:
    assert Spec.of(torch.ones(2, 3)) == Spec(torch.Size((2, 3)), torch.float32)
    assert (Spec.of(torch.ones(2, 3)).num_elements, Spec.of(torch.ones(2, 3)).num_bytes) == (6, 24)
    assert (Spec.of(torch.tensor(1j)).num_elements, Spec.of(torch.tensor(1j)).num_bytes) == (1, 8)
    assert Spec.of(torch.ones(1, 0)).num_elements == 0


@each_rule
def test_what_is_packed_is_unpacked(rule: PackingRule) -> None:
    tensors = mixed_tensors()
    layout = rule.layout(specs_of(tensors))

    for _ in range(2):
        unpacked = layout.unpack(layout.pack(tensors))

        for found, tensor in zip(unpacked, tensors, strict=True):
            torch.testing.assert_close(found, tensor, rtol=0, atol=0)


@each_rule
def test_a_pack_has_one_dtype(rule: PackingRule) -> None:
    layout = rule.layout(specs_of(mixed_tensors()))

    for pack in layout.packs:
        assert len({layout.specs[segment.tensor].dtype for segment in pack}) == 1


@each_rule
def test_every_element_lies_in_one_pack(rule: PackingRule) -> None:
    layout = rule.layout(specs_of(mixed_tensors()))

    for index, spec in enumerate(layout.specs):
        places = [s for pack in layout.packs for s in pack if s.tensor == index]
        covered = [i for s in places for i in range(s.start, s.stop)]
        assert places, "even a tensor without elements has a place"
        assert covered == list(range(spec.num_elements))


@each_rule
def test_unpacked_tensors_own_their_memory(rule: PackingRule) -> None:
    tensors = [torch.full((n,), 1.0) for n in (1, 2, 3, 5)]
    layout = rule.layout(specs_of(tensors))
    packs = [pack.clone() for pack in layout.pack(tensors)]

    unpacked = layout.unpack(packs)
    for i, tensor in enumerate(unpacked):
        tensor.fill_(10.0**i)

    assert [tensor.unique().tolist() for tensor in unpacked] == [[1], [10], [100], [1000]]
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in unpacked)


def test_packs_are_cut_across_tensors() -> None:
    specs = specs_of([torch.ones(1), torch.ones(3), torch.ones(4)])

    layout = PackLayout.of_splits(specs, [0, 1, 2], split_evenly(8, 3))

    assert layout.packs == (
        (Segment(0, 0, 1), Segment(1, 0, 1)),
        (Segment(1, 1, 3),),
        (Segment(2, 0, 4),),
    )


def test_a_pack_without_elements_keeps_its_turn() -> None:
    specs = specs_of([torch.ones(2)])

    layout = PackLayout.of_splits(specs, [0], [0, 0, 2])

    assert [pack.shape for pack in layout.pack([torch.ones(2)])] == [(0,), (0,), (2,)]
    assert layout.unpack(layout.pack([torch.ones(2)]))[0].tolist() == [1, 1]


def test_a_group_of_several_dtypes_becomes_several_packs() -> None:
    specs = specs_of([torch.ones(1), torch.ones(2, dtype=torch.int32), torch.ones(3)])

    layout = PackLayout.of_groups(specs, [[0, 1, 2]])

    assert by_dtype(specs, [2, 1, 0]) == [[2, 0], [1]]
    assert layout.packs == ((Segment(0, 0, 1), Segment(2, 0, 3)), (Segment(1, 0, 2),))


def test_a_lone_tensor_is_viewed_and_several_are_copied() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    alone = NoPacking().layout(specs_of(tensors)).pack(tensors)
    (together,) = NumPacks(1).layout(specs_of(tensors)).pack(tensors)

    assert [pack.data_ptr() for pack in alone] == [tensor.data_ptr() for tensor in tensors]
    assert together.data_ptr() not in {tensor.data_ptr() for tensor in tensors}


def test_a_transposed_tensor_is_packed_in_the_order_it_shows() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    layout = NumPacks(1).layout(specs_of([tensor]))

    (pack,) = layout.pack([tensor])

    assert pack.tolist() == [0, 3, 1, 4, 2, 5]
    assert layout.unpack([pack])[0].equal(tensor)


def test_packs_may_come_back_in_another_dtype() -> None:
    tensors = [torch.ones(2, dtype=torch.int32), torch.ones((), dtype=torch.int32)]
    layout = NumPacks(1).layout(specs_of(tensors))

    unpacked = layout.unpack([pack.double() / 2 for pack in layout.pack(tensors)])

    assert [tensor.tolist() for tensor in unpacked] == [[0.5, 0.5], 0.5]


def test_a_layout_never_changes() -> None:
    layout = NoPacking().layout([])

    with pytest.raises(FrozenInstanceError):
        layout.packs = ()  # type: ignore[misc]


@pytest.mark.timeout(20)
def test_threads_can_share_a_layout() -> None:
    sizes = (3, 0, 50, 1)
    layout = NumPacks(4).layout(specs_of([torch.ones(n) for n in sizes]))

    def round_trips(thread_id: int) -> bool:
        tensors = [torch.full((n,), 10.0**thread_id) for n in sizes]
        trips = (layout.unpack(layout.pack(tensors)) for _ in range(50))
        return all(a.equal(b) for trip in trips for a, b in zip(trip, tensors, strict=True))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(round_trips, range(4)))
