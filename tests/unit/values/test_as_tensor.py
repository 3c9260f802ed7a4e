"""Distributed values where torch, NumPy and Python take a tensor."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import unisono as uo
from unisono.errors import ReplicaMismatchError, UnsupportedError

Make = Callable[..., uo.MirroredStrategy]


def tensors(*values: Any) -> list[torch.Tensor]:
    return [torch.tensor(value) for value in values]


def seen(strategy: uo.Strategy, function: Callable[[], torch.Tensor]) -> list[Any]:
    """What each replica makes of a value that its function has captured."""
    return [result.tolist() for result in strategy.run(function).values]


OPERATORS: list[tuple[Callable[[Any], Any], Any]] = [
    (lambda v: v + 1, 4), (lambda v: 1 + v, 4), (lambda v: v - 1, 2), (lambda v: 1 - v, -2),
    (lambda v: v * v, 9), (lambda v: 6 / v, 2), (lambda v: v // 2, 1), (lambda v: 7 % v, 1),
    (lambda v: 2**v, 8), (lambda v: -v, -3), (lambda v: abs(-v), 3), (lambda v: v > 2, True),
    (lambda v: v <= 2, False), (lambda v: v == 3, True), (lambda v: v != 3, False),
    (lambda v: torch.tensor(2.0) - v, -1), (lambda v: torch.stack([v, v]).sum(), 6),
    (lambda v: torch.maximum(v, torch.tensor(5.0)), 5), (lambda v: v.sqrt() ** 2 > 2.9, True),
]  # fmt: skip


@pytest.mark.parametrize(("ours", "plain"), OPERATORS)
def test_a_mirrored_value_has_the_operators_of_a_tensor(
    ours: Callable[[Any], torch.Tensor], plain: Any
) -> None:
    assert ours(uo.Mirrored(tensors(3.0, 3.0))).item() == plain


def test_a_mirrored_value_is_indexed_iterated_and_measured() -> None:
    value = uo.Mirrored(tensors([[1.0, 2.0]], [[1.0, 2.0]]))

    assert (len(value), value[0, 1].item(), [row.tolist() for row in value]) == (1, 2, [[1, 2]])
    assert (value.shape, value.dtype, value.sum().item()) == ((1, 2), torch.float32, 3)
    assert functional.linear(torch.tensor([3.0, 4.0]), value).tolist() == [11]  # type: ignore[arg-type]


def test_a_mirrored_value_is_a_number_and_an_array() -> None:
    value = uo.Mirrored(tensors(3, 3))

    assert (int(value), float(value), bool(value), [0, 1, 2, 9][value]) == (3, 3, True, 9)
    assert np.asarray(value).tolist() == 3
    assert (np.ones(2) * uo.Mirrored(tensors([2.0, 3.0]))).tolist() == [2, 3]
    assert hash(value) == hash(value)


def test_components_that_are_no_tensors_have_their_own_operators() -> None:
    assert uo.Mirrored(["a", "a"]) + "b" == "ab"
    assert 1 + uo.Mirrored([2, 2]) == 3


def test_a_replica_sees_its_own_component(mirrored: Make) -> None:
    strategy = mirrored(3)
    same = uo.Mirrored(tensors(1.0, 2.0, 3.0))
    other: Any = uo.PerReplica(tensors(1.0, 2.0, 3.0))

    for _ in range(2):
        assert seen(strategy, lambda: same * 10) == [10, 20, 30]
        assert seen(strategy, lambda: torch.mul(other, 10)) == [10, 20, 30]
        assert seen(strategy, lambda: torch.tensor(10.0) + other) == [11, 12, 13]


def test_elsewhere_the_first_component_is_seen(mirrored: Make) -> None:
    strategy = mirrored()
    value = uo.Mirrored(tensors(1.0, 2.0))

    with strategy.scope():
        assert (value * 10).item() == 10

    def merged() -> Any:
        context = uo.get_replica_context()
        assert context is not None
        return context.merge_call(lambda _: value * 10)

    assert strategy.run(merged).item() == 10


def test_an_update_sees_the_component_of_its_replica(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        variable = uo.Variable(0.0)
    value = uo.Mirrored(tensors(1.0, 2.0))

    strategy.extended.update(variable, lambda own: own.copy_(value * 10))

    assert [component.item() for component in variable.values] == [10, 20]


# What people write who expect one loss.
USES: dict[str, Callable[[Any], Any]] = {
    "item": lambda v: v.item(),
    "float": float,
    "int": int,
    "bool": bool,
    "format": lambda v: f"{v:.3f}",
    "percent": lambda v: "%.3f" % v,  # noqa: UP031
    "detach": lambda v: v.detach(),
    "cpu": lambda v: v.cpu(),
    "numpy": lambda v: v.numpy(),
    "tolist": lambda v: v.tolist(),
    "to": lambda v: v.to("cpu"),
    "mean": lambda v: v.mean(),
    "shape": lambda v: v.shape,
    "in place": lambda v: v.add_(1),
    "add": lambda v: v + 1,
    "add from the right": lambda v: 0.0 + v,
    "add in place": lambda v: v.__iadd__(1) if hasattr(v, "__iadd__") else v + 1,
    "sum": lambda v: sum([v]),
    "max": lambda v: max(v, 1.0),
    "negative": lambda v: -v,
    "compare": lambda v: v > 1,
    "equal": lambda v: v == 1,
    "index": lambda v: v[0],
    "len": len,
    "iter": iter,
    "torch function": torch.neg,
    "torch operand": lambda v: torch.ones(1) + v,
    "torch tensor": torch.tensor,
    "numpy array": np.asarray,
    "numpy scalar": np.float32,
    "value": lambda v: v.value(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_per_replica_value_used_as_one_tensor_outside_run_says_reduce(
    use: Callable[[Any], Any],
) -> None:
    value = uo.PerReplica(tensors(1.0, 2.0))

    with pytest.raises(UnsupportedError, match=r"strategy\.reduce\(\"MEAN\", x\)"):
        use(value)


def test_a_per_replica_value_is_no_tensor_in_a_scope(mirrored: Make) -> None:
    value: Any = uo.PerReplica(tensors(1.0, 2.0))

    with mirrored().scope(), pytest.raises(UnsupportedError, match=r"strategy\.reduce"):
        torch.neg(value)


def test_a_per_replica_value_lacks_the_attributes_of_tensors_outside_run() -> None:
    value = uo.PerReplica(tensors(1.0, 2.0))

    assert not hasattr(value, "item")
    assert not hasattr(value, "color")
    assert f"{value}" == repr(value)


def test_a_per_replica_value_is_one_tensor_on_a_replica(mirrored: Make) -> None:
    value: Any = uo.PerReplica(tensors(1.0, 2.0))
    number: Any = uo.PerReplica([3, 4])

    results = mirrored().run(
        lambda: (value.item() + float(value), f"{value:.1f}", value + 1 > 2, float(number))
    )

    assert [one.values for one in results] == [(2, 4), ("1.0", "2.0"), (False, True), (3, 4)]


def test_a_value_for_fewer_replicas_names_the_one_without(mirrored: Make) -> None:
    value = uo.Mirrored(tensors(1.0))

    with pytest.raises(ReplicaMismatchError, match="none for replica 1"):
        mirrored().run(lambda: value + 1)


def test_nothing_changes_a_mirrored_value_in_place() -> None:
    value: Any = uo.Mirrored(tensors([1.0], [1.0]))
    refused: list[Callable[[], Any]] = [
        lambda: torch.add(torch.ones(1), 1, out=value),
        lambda: torch.relu_(value),
        lambda: value.add_(1),
        lambda: setattr(value, "grad", None),
    ]

    for call in refused:
        with pytest.raises((UnsupportedError, AttributeError)):
            call()
    value += 1
    assert isinstance(value, torch.Tensor)
    assert value.tolist() == [2]


def test_gradients_flow_through_what_a_replica_sees(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        variable = uo.Variable(3.0)

    def step() -> Any:
        context = uo.get_replica_context()
        assert context is not None
        total = context.all_reduce("SUM", variable)
        return torch.autograd.grad(total, variable)[0]  # type: ignore[call-overload]

    assert seen(strategy, step) == [2, 2]


def test_a_mirrored_value_and_a_variable_can_be_broadcast_and_averaged(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        variable = uo.Variable(4.0, aggregation=uo.VariableAggregation.MEAN)
    value = uo.Mirrored(tensors(4.0, 4.0))

    for one in (value, variable):
        assert strategy.reduce("MEAN", one).item() == 4
        copied = strategy.extended.broadcast_to(one, value)
        assert [component.item() for component in copied.values] == [4, 4]
