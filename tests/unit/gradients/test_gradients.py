from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_replica import replica_id
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import unisono as uo
from unisono.errors import UnequalCallsError
from unisono.experimental import CommunicationOptions
from unisono.reductions import select_cross_device_ops

Make = Callable[..., uo.MirroredStrategy]


def powers(num_replicas: int, *shape: int) -> uo.PerReplica:
    return uo.PerReplica(torch.full(shape, 10.0**i) for i in range(num_replicas))


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.clone()


@pytest.mark.parametrize(("op", "expected"), [(uo.ReduceOp.MEAN, 37), (uo.ReduceOp.SUM, 111)])
def test_after_backward_every_replica_has_the_reduced_gradient(
    mirrored: Make, memories: str, op: uo.ReduceOp, expected: float
) -> None:
    strategy = mirrored(3, reduce_gradients=op)
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)

    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        model(x).sum().backward()
        return gradient(model.weight)

    for _ in range(2):
        found = strategy.run(step, args=(powers(3, 1, 1),)).values
        assert [g.item() for g in found] == [expected] * 3


@pytest.mark.parametrize(("op", "expected"), [(uo.ReduceOp.MEAN, 11), (uo.ReduceOp.SUM, 22)])
def test_two_backward_passes_add_up(mirrored: Make, op: uo.ReduceOp, expected: float) -> None:
    strategy = mirrored(2, reduce_gradients=op)
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)

    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        model(x).sum().backward()
        model(x).sum().backward()
        return gradient(model.weight)

    found = strategy.run(step, args=(powers(2, 1, 1),)).values

    assert [g.item() for g in found] == [expected] * 2


@pytest.mark.parametrize(("op", "expected"), [(uo.ReduceOp.MEAN, 5.5), (uo.ReduceOp.SUM, 11)])
def test_a_second_pass_leaves_the_gradients_of_others_alone(
    mirrored: Make, op: uo.ReduceOp, expected: float
) -> None:
    strategy = mirrored(2, reduce_gradients=op)
    with strategy.scope():
        first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

    def step(x: Tensor) -> Tensor:
        first(x).sum().backward()
        second(x).sum().backward()
        return torch.stack([gradient(first.weight), gradient(second.weight)]).flatten()

    found = strategy.run(step, args=(powers(2, 1, 1),)).values

    assert [g.tolist() for g in found] == [[expected] * 2] * 2


@pytest.mark.parametrize("op", [uo.ReduceOp.MEAN, uo.ReduceOp.SUM])
def test_no_sync_adds_up_and_reduces_once(mirrored: Make, op: uo.ReduceOp) -> None:
    strategy = mirrored(2, reduce_gradients=op)
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)

    def step(x: Tensor) -> Any:
        model.zero_grad()
        with strategy.no_sync():
            model(x).sum().backward()
            model(x).sum().backward()
        own = gradient(model.weight)
        model(x).sum().backward()
        return own, gradient(model.weight)

    own, total = strategy.run(step, args=(powers(2, 1, 1),))

    assert [g.item() for g in own.values] == [2, 20]
    expected = 33 if op is uo.ReduceOp.SUM else 16.5
    assert [g.item() for g in total.values] == [expected] * 2


def test_a_parameter_that_one_replica_does_not_use_counts_as_zero(
    mirrored: Make, memories: str
) -> None:
    strategy = mirrored(3)
    with strategy.scope():
        model = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))

    def step() -> list[Tensor | None]:
        model.zero_grad()
        used = [layer for i, layer in enumerate(model) if i == 0 or i == replica_id()]
        total = sum((layer(torch.full((1, 1), 3.0)).sum() for layer in used), torch.zeros(()))
        total.backward()
        return [p.grad for p in model.parameters()]

    for _ in range(2):
        gradients = strategy.experimental_local_results(strategy.run(step))
        found = [[g.item() for g in own if g is not None] for own in gradients]
        assert found == [[3, 1, 1]] * 3


def test_a_parameter_that_nobody_uses_has_no_gradient(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))

    def step() -> bool:
        model[0](torch.ones(1, 1)).sum().backward()
        return model[1].weight.grad is None

    assert strategy.run(step) is True


def test_a_replica_whose_loss_uses_no_parameter(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.item()

    def step() -> None:
        optimizer.zero_grad()
        used = model(torch.full((1, 1), 3.0)) if replica_id() == 0 else torch.ones(1)
        used.requires_grad_().sum().backward()
        optimizer.step()

    strategy.run(step)

    assert model.weight.item() == pytest.approx(before - 1.5)


def test_a_replica_without_a_backward_pass_is_named(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> None:
        if replica_id() == 0:
            model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    with pytest.raises(UnequalCallsError, match=r"replica 0 is in backward\(\).*1 is in SGD.step"):
        strategy.run(step)


def test_frozen_parameters_have_no_gradient(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].requires_grad_(False)

    def step() -> list[bool]:
        model(torch.ones(1, 1)).sum().backward()
        return [p.grad is not None for p in model.parameters()]

    assert strategy.run(step) == [False, False, True, True]


def test_sparse_gradients_stay_sparse(mirrored: Make, memories: str) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Embedding(4, 1, sparse=True)
    rows = uo.PerReplica((torch.tensor([0, 1]), torch.tensor([1, 3])))

    def step(row: Tensor) -> Tensor:
        model.zero_grad()
        model(row).sum().backward()
        return gradient(model.weight)

    for _ in range(2):
        for found in strategy.run(step, args=(rows,)).values:
            assert found.is_sparse
            assert found.to_dense().flatten().tolist() == [0.5, 1, 0, 0.5]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_through_a_checkpoint(mirrored: Make, use_reentrant: bool) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    x = torch.randn(4, 3)

    def step(x: Tensor, *, is_checkpointed: bool) -> list[Tensor]:
        model.zero_grad()
        x = x.clone().requires_grad_()
        if is_checkpointed:
            hidden = checkpoint(model, x, use_reentrant=use_reentrant)
            output = checkpoint(model, hidden, use_reentrant=use_reentrant)
        else:
            output = model(model(x))
        output.sum().backward()
        return [gradient(p) for p in model.parameters()]

    args = (uo.PerReplica(x.chunk(2)),)
    plain = strategy.run(step, args=args, kwargs={"is_checkpointed": False})
    found = strategy.run(step, args=args, kwargs={"is_checkpointed": True})

    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one.values[1], other.values[1])


def test_gradients_of_replicas_can_be_changed_in_place(mirrored: Make, memories: str) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.ModuleList([nn.Linear(1, 1), nn.Embedding(4, 1, sparse=True)])

    def step() -> list[float]:
        (model[0](torch.ones(1, 1)).sum() + model[1](torch.tensor([1])).sum()).backward()
        for p in model.parameters():
            gradient_ = p.grad
            assert gradient_ is not None
            gradient_.mul_(10.0)
        return [gradient(p).to_dense().sum().item() for p in model.parameters()]

    assert strategy.experimental_local_results(strategy.run(step)) in (
        ([10.0, 10.0, 10.0],),
        ([10.0, 10.0, 10.0], [10.0, 10.0, 10.0]),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_other_dtypes(mirrored: Make, dtype: torch.dtype) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False, dtype=dtype)

    def step(x: Tensor) -> Tensor:
        (model.weight * x.to(dtype)).sum().backward()
        return gradient(model.weight)

    found = strategy.run(step, args=(powers(2, 1),)).values

    assert [(g.item(), g.dtype) for g in found] == [(5.5, dtype)] * 2


def train(strategy: uo.Strategy) -> Tensor:
    torch.manual_seed(4)
    with strategy.scope():
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
        optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(5, 16)).square().mean().backward()
        optimizer.step()

    for _ in range(5):
        strategy.run(step)
    strategy.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_size_of_packs_does_not_change_a_bit(memories: str) -> None:
    class Packing(uo.MirroredStrategy):
        def __init__(self, bytes_per_pack: int) -> None:
            devices = tuple(uo.Device("cpu", i) for i in range(3))
            uo.Strategy.__init__(
                self,
                uo.StrategyExtended(
                    devices,
                    select_cross_device_ops(devices),
                    options=CommunicationOptions(bytes_per_pack=bytes_per_pack),
                ),
            )

    weights = [train(Packing(size)) for size in (1, 1 << 10, 5000, 1 << 30)]

    for one in weights[1:]:
        assert torch.equal(one, weights[0])


def test_two_runs_and_two_kinds_of_memory_agree_to_the_bit(mirrored: Make) -> None:
    from unisono.testing import separate_memories

    first, again = train(mirrored(3)), train(mirrored(3))
    with separate_memories():
        separate = train(mirrored(3))

    assert torch.equal(first, again)
    assert torch.equal(first, separate)


def test_a_pass_by_the_function_of_autograd_is_one_also_without_gradients(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(2, 1, bias=False)

    def step() -> None:
        context = uo.get_replica_context()
        assert context is not None
        if context.local_id == 0:
            torch.autograd.backward([model(torch.ones(1, 2)).sum()])
        else:
            torch.autograd.backward([torch.ones(2, requires_grad=True).sum()])

    strategy.run(step)

    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[0.5, 0.5]]
