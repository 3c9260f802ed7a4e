from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_replica import replica
from torch import Tensor

import unisono as uo
from unisono.errors import ReplicaMismatchError, UnsupportedError

Make = Callable[..., uo.MirroredStrategy]


def on_each(strategy: uo.Strategy, fn: Callable[[int], Any]) -> list[Any]:
    """Returns what `fn(replica_id)` gives on each replica, having been called there twice."""

    def step() -> Any:
        own = replica().replica_id_in_sync_group
        fn(own)
        return [fn(own)]

    return [result for (result,) in strategy.experimental_local_results(strategy.run(step))]


@pytest.mark.parametrize(
    ("op", "scalar", "vector"), [("SUM", 4, [42, 43]), ("mean", 2, [21, 21.5])]
)
def test_all_reduce_of_a_structure(
    mirrored: Make, memories: str, op: str, scalar: float, vector: list[float]
) -> None:
    vectors = [torch.tensor([39.0, 2.0]), torch.tensor([3.0, 41.0])]

    def reduce(own: int) -> Any:
        value = {"a": torch.tensor(1.0 + 2 * own), "b": [vectors[own]]}
        return replica().all_reduce(op, value)

    for result in on_each(mirrored(), reduce):
        assert result["a"].item() == scalar
        assert result["b"][0].tolist() == vector


@pytest.mark.parametrize(
    ("op", "expected"), [("MIN", [1, -300]), ("MAX", [100, -3]), ("PROD", [1000, -27000])]
)
def test_all_reduce_with_other_operations(
    mirrored: Make, memories: str, op: str, expected: list[float]
) -> None:
    values = [torch.tensor([10.0**i, -3 * 10.0**i]) for i in range(3)]

    results = on_each(mirrored(3), lambda own: replica().all_reduce(op, values[own]))

    assert [result.tolist() for result in results] == [expected] * 3


def test_an_unknown_operation_is_refused(mirrored: Make) -> None:
    with pytest.raises(UnsupportedError, match="reduce_op"):
        mirrored().run(lambda: replica().all_reduce("MEDIAN", torch.ones(1)))


@pytest.mark.parametrize("shape", [(), (1, 0), (0,), (3, 1)])
def test_all_reduce_of_every_shape(mirrored: Make, shape: tuple[int, ...]) -> None:
    results = on_each(
        mirrored(3), lambda own: replica().all_reduce("SUM", torch.full(shape, 10.0**own))
    )

    for result in results:
        torch.testing.assert_close(result, torch.full(shape, 111.0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float16, torch.bfloat16])
def test_all_reduce_keeps_the_dtype_of_a_sum(mirrored: Make, dtype: torch.dtype) -> None:
    results = on_each(
        mirrored(),
        lambda own: replica().all_reduce("SUM", [torch.tensor(own, dtype=dtype)] * 2),
    )

    for result in results:
        assert [(part.item(), part.dtype) for part in result] == [(1, dtype)] * 2


def test_the_mean_of_integers_is_real(mirrored: Make) -> None:
    results = on_each(mirrored(), lambda own: replica().all_reduce("MEAN", torch.tensor(own)))

    assert [result.item() for result in results] == [0.5, 0.5]


def test_python_numbers_can_be_reduced(mirrored: Make) -> None:
    results = on_each(mirrored(), lambda own: replica().all_reduce("SUM", own + 0.5))

    assert [result.item() for result in results] == [2.0, 2.0]


@pytest.mark.parametrize(("op", "expected"), [("SUM", 4), ("MEAN", 2)])
def test_the_gradient_of_all_reduce_is_all_reduced(
    mirrored: Make, memories: str, op: str, expected: float
) -> None:
    def gradient(own: int) -> Tensor:
        x = torch.tensor(5.0, requires_grad=True)
        (replica().all_reduce(op, x) * (1.0 + 2 * own)).backward()
        assert x.grad is not None
        return x.grad

    assert [g.item() for g in on_each(mirrored(), gradient)] == [expected, expected]


def test_the_gradient_of_a_gradient(mirrored: Make) -> None:
    def second(own: int) -> Tensor:
        x = torch.tensor(3.0 + own, requires_grad=True)
        total = replica().all_reduce("SUM", x * x)
        (first,) = torch.autograd.grad(total * (own + 1.0), x, create_graph=True)
        (result,) = torch.autograd.grad(first, x)
        return result

    assert [g.item() for g in on_each(mirrored(), second)] == [6, 6]


def test_one_replica_gets_its_own_value_and_gradient() -> None:
    with uo.OneDeviceStrategy("cpu:0").scope() as strategy:
        pass

    def step() -> Any:
        x = torch.tensor([42.0, 43.0], requires_grad=True)
        reduced = replica().all_reduce("SUM", x)
        (reduced * torch.tensor([3.0, 4.0])).sum().backward()
        return reduced, x.grad

    reduced, grad = strategy.run(step)

    assert reduced.tolist() == [42, 43]
    assert grad.tolist() == [3, 4]


def test_outside_every_scope_all_reduce_gives_the_value() -> None:
    assert replica().all_reduce("SUM", torch.tensor(4.0)).item() == 4
    assert replica().all_gather(torch.tensor([4.0]), 0).tolist() == [4]


def test_sparse_tensors_are_reduced_by_row(mirrored: Make, memories: str) -> None:
    def reduce(own: int) -> Tensor:
        sparse = torch.zeros(3).index_fill_(0, torch.tensor(own), own + 1.0).to_sparse()
        result = replica().all_reduce("MEAN", sparse)
        assert isinstance(result, Tensor)
        return result

    for result in on_each(mirrored(), reduce):
        assert result.is_sparse
        assert result.to_dense().tolist() == [0.5, 1, 0]


def test_other_numbers_of_tensors_are_an_error(mirrored: Make) -> None:
    strategy = mirrored()

    def step() -> Any:
        own = replica().replica_id_in_sync_group
        return replica().all_reduce("SUM", [torch.ones(1)] * (own + 1))

    with pytest.raises((ReplicaMismatchError, RuntimeError), match=r"replica"):
        strategy.run(step)


def test_other_shapes_are_an_error(mirrored: Make) -> None:
    strategy = mirrored()

    def step() -> Any:
        return replica().all_reduce("SUM", torch.ones(1 + replica().replica_id_in_sync_group))

    with pytest.raises(ReplicaMismatchError):
        strategy.run(step)
    assert strategy.run(lambda: 5) == 5


def test_results_of_replicas_do_not_share_memory(mirrored: Make) -> None:
    def reduce(own: int) -> Tensor:
        total: Tensor = replica().all_reduce("SUM", torch.ones(2))
        replica().merge_call(lambda _: None)
        return total.mul_(10.0**own)

    results = on_each(mirrored(), reduce)

    assert [result.tolist() for result in results] == [[2, 2], [20, 20]]


def test_all_gather_puts_the_replicas_end_to_end(mirrored: Make, memories: str) -> None:
    values = [torch.tensor([1, 2]), torch.tensor([3, 4])]

    results = on_each(mirrored(), lambda own: replica().all_gather(values[own], 0))

    assert [result.tolist() for result in results] == [[1, 2, 3, 4]] * 2


def test_all_gather_of_uneven_lengths(mirrored: Make) -> None:
    values = [
        {"a": torch.tensor([0]), "b": torch.tensor([[0, 1]])},
        {"a": torch.tensor([1]), "b": torch.tensor([[2, 3], [4, 5]])},
    ]

    for result in on_each(mirrored(), lambda own: replica().all_gather(values[own], axis=0)):
        assert result["a"].tolist() == [0, 1]
        assert result["b"].tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("axis", [2, -1])
def test_all_gather_along_another_axis(mirrored: Make, axis: int) -> None:
    results = on_each(mirrored(4), lambda _: replica().all_gather(torch.ones(1, 2, 3), axis))

    assert [tuple(result.shape) for result in results] == [(1, 2, 12)] * 4


def test_all_gather_of_an_empty_part(mirrored: Make) -> None:
    results = on_each(mirrored(3), lambda own: replica().all_gather(torch.full((own,), own), 0))

    assert [result.tolist() for result in results] == [[1, 2, 2]] * 3


def test_the_gradient_of_all_gather_is_the_own_part_of_the_sum(
    mirrored: Make, memories: str
) -> None:
    factors = [torch.tensor([1.0, 2, 3, 4]), torch.tensor([10.0, 20, 30, 40])]

    def gradient(own: int) -> Tensor:
        x = torch.zeros(2, requires_grad=True)
        (replica().all_gather(x, 0) * factors[own]).sum().backward()
        assert x.grad is not None
        return x.grad

    assert [g.tolist() for g in on_each(mirrored(), gradient)] == [[11, 22], [33, 44]]


def test_the_gradient_of_an_uneven_all_gather(mirrored: Make) -> None:
    def gradient(own: int) -> Tensor:
        x = torch.zeros(1 + own, requires_grad=True)
        (replica().all_gather(x, 0) * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
        assert x.grad is not None
        return x.grad

    assert [g.tolist() for g in on_each(mirrored(), gradient)] == [[2], [20, 200]]


def test_a_scalar_cannot_be_gathered(mirrored: Make) -> None:
    with pytest.raises(UnsupportedError, match="scalar"):
        mirrored().run(lambda: replica().all_gather(torch.tensor(1.0), 0))


def test_a_sparse_tensor_cannot_be_gathered(mirrored: Make) -> None:
    with pytest.raises(UnsupportedError, match="to_dense"):
        mirrored().run(lambda: replica().all_gather(torch.ones(2).to_sparse(), 0))
