"""Reductions and training on a real GPU, which several replicas share as virtual ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as uo
from unisono.kernels import tree_reduce
from unisono.testing import virtual_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*use of fork")]

GPUS = ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
MIXED = ["cuda:0", "cpu:0", "cuda:1", "cpu:1", "cuda:2"]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.complex64]
OPS: dict[str, Any] = {
    "one_device": uo.ReductionToOneDevice,
    "one_device_at_cpu": lambda: uo.ReductionToOneDevice("cpu:0"),
    "hierarchical": uo.HierarchicalCopyAllReduce,
    "hierarchical_3_packs": lambda: uo.HierarchicalCopyAllReduce(3),
    "nccl": uo.NcclAllReduce,
    "contrib": lambda: uo.contrib.AllReduceCrossDeviceOps("hierarchical_copy", 0, 64, 3),
}


@pytest.fixture(autouse=True)
def _gpus() -> Iterator[None]:
    with virtual_gpus(4):
        yield


def on(devices: list[str], tensors: list[Tensor]) -> uo.PerReplica:
    placed = [t.to(name.split(":")[0]) for t, name in zip(tensors, devices, strict=True)]
    return uo.PerReplica(placed, devices)


@pytest.mark.parametrize("make", OPS.values(), ids=OPS)
@pytest.mark.parametrize("devices", [GPUS, MIXED, GPUS[:1], GPUS[:3]], ids=len)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_batch_has_the_bits_of_the_host(
    make: Any, devices: list[str], dtype: torch.dtype
) -> None:
    ops = make()
    tensors = [
        [(torch.randn(shape) * 9).to(dtype) for _ in devices]
        for shape in [(), (0,), (3, 4), (1000,)]
    ]
    pairs = [(value, value) for value in (on(devices, one) for one in tensors)]

    for op in (uo.ReduceOp.SUM, uo.ReduceOp.MEAN):
        for _ in range(2):
            results = ops.batch_reduce(op, pairs)

            for result, one in zip(results, tensors, strict=True):
                parts = result.values if isinstance(result, uo.Mirrored) else (result,)
                assert [part.device.type for part in parts] == [d.split(":")[0] for d in devices]
                for part in parts:
                    torch.testing.assert_close(part.cpu(), tree_reduce(op, one), rtol=0, atol=0)


def test_sparse_gradients_are_put_end_to_end() -> None:
    value = on(GPUS[:2], [torch.eye(3).to_sparse(), torch.eye(3).to_sparse()])

    result = uo.HierarchicalCopyAllReduce().reduce(uo.ReduceOp.SUM, value, "cuda:1")

    assert isinstance(result, Tensor)
    assert result._values().tolist() == [1.0] * 6


def test_an_absent_gpu_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"no cuda:7 .* cuda:0, cuda:1, cuda:2, cuda:3"):
        uo.ReductionToOneDevice().reduce(uo.ReduceOp.SUM, torch.ones(1), "cuda:7")


def trained(num_replicas: int) -> list[Tensor]:
    torch.manual_seed(0)
    plain = num_replicas == 0
    strategy = uo.MirroredStrategy(GPUS[: max(1, num_replicas)])
    with strategy.scope():
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if plain:
        model.cuda()

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    batches = [(torch.randn(12, 8).double(), torch.randint(0, 3, (12,))) for _ in range(6)]
    if plain:
        for x, y in batches:
            step(x.cuda(), y.cuda())
    else:
        for x, y in strategy.experimental_distribute_dataset(batches):
            strategy.run(step, args=(x, y))
    strategy.close()
    return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_replicas_end_with_the_weights_of_one_device(num_replicas: int) -> None:
    expected = trained(0)

    first, second = trained(num_replicas), trained(num_replicas)

    for weight, again, other in zip(first, second, expected, strict=True):
        assert torch.equal(weight, again)
        torch.testing.assert_close(weight, other, rtol=0, atol=1e-12)
