import dataclasses
import pickle
from typing import Any

import pytest

from unisono.errors import UnsupportedError
from unisono.options import (
    DEFAULT_OPTIONS,
    CommunicationImplementation,
    CommunicationOptions,
    ReduceOp,
    VariableAggregation,
)

AUTO = CommunicationImplementation.AUTO
RING = CommunicationImplementation.RING
NCCL = CommunicationImplementation.NCCL
BASE = CommunicationOptions(10, 5.0, RING)


@pytest.mark.parametrize("op", ReduceOp)
def test_a_reduce_op_is_a_member_or_its_name_in_any_case(op: ReduceOp) -> None:
    assert ReduceOp.read(op) is ReduceOp.read(op.name) is ReduceOp.read(op.name.lower()) is op


@pytest.mark.parametrize("wrong", ["total", "", None, 0, VariableAggregation.SUM])
def test_what_is_no_reduce_op_is_refused_and_shown(wrong: object) -> None:
    with pytest.raises(UnsupportedError, match=r"one of ReduceOp\.SUM, .*got ") as caught:
        ReduceOp.read(wrong)

    assert repr(wrong) in str(caught.value)


def test_options_are_unset_by_default() -> None:
    assert CommunicationOptions() == CommunicationOptions(0, None, AUTO) == DEFAULT_OPTIONS


@pytest.mark.parametrize("spelling", ["ring", "RING", "Ring", RING])
def test_an_implementation_is_a_member_or_its_name_in_any_case(spelling: Any) -> None:
    assert CommunicationOptions(implementation=spelling).implementation is RING


@pytest.mark.parametrize("wrong", ["foo", "", 3, None])
def test_an_unknown_implementation_is_refused_and_shown(wrong: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"AUTO, RING, NCCL, TCP or .* got {wrong!r}"):
        CommunicationOptions(implementation=wrong)


def test_a_negative_pack_size_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="0 or more, got -1"):
        CommunicationOptions(bytes_per_pack=-1)


@pytest.mark.parametrize(
    ("other", "merged"),
    [
        (CommunicationOptions(bytes_per_pack=20), CommunicationOptions(20, 5.0, RING)),
        (CommunicationOptions(timeout_seconds=0.0), CommunicationOptions(10, 0.0, RING)),
        (CommunicationOptions(timeout_seconds=7.0), CommunicationOptions(10, 7.0, RING)),
        (CommunicationOptions(implementation=AUTO), BASE),
        (CommunicationOptions(implementation=NCCL), CommunicationOptions(10, 5.0, NCCL)),
        (CommunicationOptions(1, 2.0, NCCL), CommunicationOptions(1, 2.0, NCCL)),
        (CommunicationOptions(), BASE),
        (None, BASE),
    ],
)
def test_a_field_that_the_other_sets_wins(
    other: CommunicationOptions | None, merged: CommunicationOptions
) -> None:
    assert BASE.merge(other) == merged


def test_merging_changes_neither_side() -> None:
    other = CommunicationOptions(20, 6.0, NCCL)

    BASE.merge(other)

    assert CommunicationOptions(10, 5.0, RING) == BASE
    assert other == CommunicationOptions(20, 6.0, NCCL)


@pytest.mark.parametrize("field", ["bytes_per_pack", "timeout_seconds", "implementation"])
def test_options_never_change(field: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(DEFAULT_OPTIONS, field, 1)


def test_options_can_be_keys_and_can_be_pickled() -> None:
    assert {BASE: 1}[pickle.loads(pickle.dumps(BASE))] == 1


def test_an_object_is_an_instance_of_the_class_that_made_it() -> None:
    assert isinstance(BASE, CommunicationOptions)
