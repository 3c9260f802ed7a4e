import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import unisono as uo
from unisono.errors import ReplicaMismatchError, UnsupportedError

Make = Callable[..., uo.MirroredStrategy]


def per_replica(*values: Any) -> uo.PerReplica:
    return uo.PerReplica(torch.tensor(value) for value in values)


PAIR = per_replica([1.0, 2.0], [3.0, 4.0])


@pytest.fixture
def strategy(mirrored: Make, memories: str) -> uo.Strategy:
    return mirrored()


@pytest.mark.parametrize(
    ("op", "axis", "expected"),
    [
        ("SUM", None, [4, 6]),
        ("MEAN", None, [2, 3]),
        ("SUM", 0, 10),
        ("MEAN", 0, 2.5),
        ("mean", (0,), 2.5),
        (uo.ReduceOp.SUM, [0], 10),
        ("MAX", None, [3, 4]),
        ("MIN", None, [1, 2]),
        ("PROD", None, [3, 8]),
    ],
)
def test_reduce(strategy: uo.Strategy, op: Any, axis: Any, expected: Any) -> None:
    for _ in range(2):
        assert strategy.reduce(op, PAIR, axis=axis).tolist() == expected


def test_what_replicas_return(strategy: uo.Strategy) -> None:
    for _ in range(2):
        assert strategy.reduce("SUM", strategy.run(lambda: torch.ones(()))).item() == 2
        with strategy.scope():
            assert strategy.reduce("SUM", strategy.run(lambda: torch.ones(()))).item() == 2


@pytest.mark.parametrize(("op", "expected"), [("SUM", 2), ("MEAN", 2 / 3)])
def test_replicas_of_other_lengths(strategy: uo.Strategy, op: str, expected: float) -> None:
    value = per_replica([0.0], [1.0, 1.0])

    assert strategy.reduce(op, value, axis=0).item() == pytest.approx(expected)


def test_other_lengths_need_an_axis(strategy: uo.Strategy) -> None:
    value = per_replica([0.0, 1, 2, 3], [4.0, 5])

    with pytest.raises(ReplicaMismatchError):
        strategy.reduce("SUM", value)
    assert strategy.reduce("SUM", value, axis=0).item() == 15
    assert strategy.reduce("MEAN", value, axis=0).item() == 2.5


def test_empty_replicas(strategy: uo.Strategy) -> None:
    empty: list[float] = []

    assert strategy.reduce("MEAN", per_replica([3.0, 5.0], empty), axis=0).item() == 4
    assert math.isnan(strategy.reduce("MEAN", per_replica(empty, empty), axis=0).item())


@pytest.mark.parametrize(
    ("op", "axis", "expected"),
    [("MEAN", -1, [3.5, 5.5]), ("MEAN", (0, 1), 4.5), ("SUM", (0, 1), 36)],
)
def test_axes(strategy: uo.Strategy, op: str, axis: Any, expected: Any) -> None:
    value = per_replica([[1.0, 2], [3, 4]], [[5.0, 6], [7, 8]])

    assert strategy.reduce(op, value, axis=axis).tolist() == expected


def test_the_mean_of_integers_is_float64(strategy: uo.Strategy) -> None:
    mean = strategy.reduce("MEAN", per_replica([1, 2], [3, 5]), axis=0)

    assert (mean.item(), mean.dtype) == (2.75, torch.float64)


def test_one_value_has_a_mean_but_no_sum(strategy: uo.Strategy) -> None:
    with pytest.raises(
        UnsupportedError, match=r"not one value per replica, so its sum .* has no meaning"
    ):
        strategy.reduce("SUM", torch.tensor(5.0))
    assert strategy.reduce("MEAN", torch.tensor(5.0)).item() == 5
    assert uo.OneDeviceStrategy("cpu:0").reduce("SUM", torch.tensor(5.0)).item() == 5


def test_one_value_with_an_axis_counts_for_each_replica(strategy: uo.Strategy) -> None:
    value = torch.tensor([5.0, 6.0])

    assert strategy.reduce("SUM", value, axis=0).item() == 22
    assert strategy.reduce("MEAN", value, axis=0).item() == 5.5


def test_a_mirrored_value_has_a_mean_but_no_sum(strategy: uo.Strategy) -> None:
    value = uo.Mirrored((torch.tensor(5.0), torch.tensor(5.0)))

    with pytest.raises(UnsupportedError, match="mirrored"):
        strategy.reduce("SUM", value)
    assert strategy.reduce("MEAN", value).item() == 5


def test_structures(strategy: uo.Strategy) -> None:
    reduced = strategy.reduce("SUM", {"a": PAIR, "b": [PAIR]})

    assert reduced["a"].tolist() == reduced["b"][0].tolist() == [4, 6]


@pytest.mark.parametrize("axis", ["0", 1.5, [None]])
def test_an_axis_is_an_int(strategy: uo.Strategy, axis: Any) -> None:
    with pytest.raises(UnsupportedError, match="axis"):
        strategy.reduce("SUM", PAIR, axis=axis)


@pytest.mark.parametrize("op", ["MEDIAN", None, uo.CrossDeviceOps])
def test_an_unknown_operation_is_refused(strategy: uo.Strategy, op: Any) -> None:
    with pytest.raises(UnsupportedError, match="reduce_op"):
        strategy.reduce(op, PAIR)


def gathers(strategy: uo.Strategy, value: uo.PerReplica, axis: Any) -> list[Any]:
    """The two ways to gather: for all replicas, and on each of them."""

    def step(own: Any) -> Any:
        context = uo.get_replica_context()
        assert context is not None
        return context.all_gather(own, axis)

    return [lambda: strategy.gather(value, axis), lambda: strategy.run(step, (value,))]


# torch warns that these layouts are new.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    COO = torch.eye(2).to_sparse()
    CSR = torch.eye(2).to_sparse_csr()
    NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    JAGGED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (torch.ones(2, 3), torch.ones(2, 2), r"shape but for dimension 0 .* replica 1 has \(2,\)"),
        (torch.ones(2, 3), torch.ones(2), "number of dimensions"),
        (torch.ones(2), torch.ones(2, dtype=torch.int32), r"dtype .* replica 1 has torch\.int32"),
    ],
)
def test_values_that_do_not_go_together_are_not_gathered(
    strategy: uo.Strategy, first: Any, second: Any, message: str
) -> None:
    for gather in gathers(strategy, uo.PerReplica([first, second]), 0):
        with pytest.raises(ReplicaMismatchError, match=message):
            gather()


@pytest.mark.parametrize(
    ("tensor", "axis", "message"),
    [
        (COO, 0, r"layout torch\.sparse_coo and cannot be gathered.*to_dense"),
        (CSR, 0, r"layout torch\.sparse_csr and cannot be gathered.*to_dense"),
        (NESTED, 0, "nested tensor, which cannot be gathered.*to_padded_tensor"),
        (JAGGED, 0, "nested tensor, which cannot be gathered.*to_padded_tensor"),
        (torch.ones(()), 0, r"A scalar .* `\.reshape\(1\)`"),
        (torch.ones(2, 2), 99, "`axis` must be from -2 to 1, .* got 99"),
        (torch.ones(2, 2), -3, "`axis` must be from -2 to 1, .* got -3"),
        (torch.ones(2, 2), "0", "`axis` must be an int, got '0'"),
        (torch.ones(2, 2), None, "`axis` must be an int, got None"),
    ],
)
def test_what_cannot_be_gathered_is_refused(
    strategy: uo.Strategy, tensor: Any, axis: Any, message: str
) -> None:
    for gather in gathers(strategy, uo.PerReplica([tensor, tensor]), axis):
        with pytest.raises(UnsupportedError, match=message):
            gather()


@pytest.mark.parametrize("tensor", [CSR, NESTED, JAGGED], ids=["csr", "nested", "jagged"])
@pytest.mark.parametrize("axis", [None, 0])
def test_layouts_that_cannot_be_reduced_are_refused(
    strategy: uo.Strategy, tensor: Any, axis: Any
) -> None:
    with pytest.raises(UnsupportedError, match=r"layout torch\.sparse_csr|is a nested tensor"):
        strategy.reduce("SUM", uo.PerReplica([tensor, tensor]), axis)


@pytest.mark.parametrize("axis", [99, -3, (0, 5), (0, 0), (0, -2)])
def test_an_axis_is_a_dimension_of_the_value(strategy: uo.Strategy, axis: Any) -> None:
    with pytest.raises(UnsupportedError, match="`axis` must"):
        strategy.reduce("SUM", uo.PerReplica([torch.ones(2, 2)] * 2), axis)


def test_a_scalar_has_no_axis(strategy: uo.Strategy) -> None:
    with pytest.raises(UnsupportedError, match="a scalar has no dimension"):
        strategy.reduce("SUM", uo.PerReplica([torch.ones(())] * 2), 0)


def test_gather(strategy: uo.Strategy) -> None:
    plain = torch.ones(2)

    assert strategy.gather(PAIR, 0).tolist() == [1, 2, 3, 4]
    assert strategy.gather(per_replica([1.0], [2.0, 3.0]), axis=0).tolist() == [1, 2, 3]
    assert strategy.gather(plain, 0) is plain


def test_reduce_to_every_device(strategy: uo.Strategy) -> None:
    reduced = strategy.extended.reduce_to("SUM", PAIR, PAIR)

    assert isinstance(reduced, uo.Mirrored)
    assert [part.tolist() for part in reduced.values] == [[4, 6], [4, 6]]


def test_batch_reduce_to(strategy: uo.Strategy) -> None:
    results = strategy.extended.batch_reduce_to("MEAN", [(PAIR, "cpu:0"), (PAIR, PAIR)])

    assert results[0].tolist() == [2, 3]
    assert results[1].values[1].tolist() == [2, 3]


def test_broadcast_to(strategy: uo.Strategy) -> None:
    tensor = torch.tensor([1.0, 2.0])

    everywhere = strategy.extended.broadcast_to(tensor, PAIR)

    assert isinstance(everywhere, uo.Mirrored)
    assert [part.tolist() for part in everywhere.values] == [[1, 2], [1, 2]]


def test_reduce_in_a_merge_call(strategy: uo.Strategy) -> None:
    def merge(merged: uo.Strategy, value: Any) -> Tensor:
        total: Tensor = merged.reduce("SUM", value)
        return total

    def step(x: Tensor) -> Any:
        context = uo.get_replica_context()
        assert context is not None
        return context.merge_call(merge, args=(x,)).tolist()

    results = strategy.experimental_local_results(strategy.run(step, args=(PAIR,)))

    assert results == ([4, 6], [4, 6])
