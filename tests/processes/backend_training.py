"""Programs that train with torch's own wrappers, over any process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

NUM_STEPS = 3
Wrap = Callable[[nn.Module, Any], nn.Module]


class Network(nn.Module):
    """Has a layer that odd steps do not use, if it may, and sparse gradients, if it may."""

    def __init__(self, *, has_detour: bool, is_sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 5, sparse=is_sparse)
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.detour = nn.Linear(7, 7) if has_detour else None
        self.last = nn.Linear(7, 3)

    def forward(self, words: Tensor, step: int) -> Tensor:
        hidden = self.norm(self.first(self.words(words).sum(1))).relu()
        if self.detour is not None and step % 2 == 0:
            hidden = self.detour(hidden)
        scores: Tensor = self.last(hidden)
        return scores


def parallel(**options: Any) -> Wrap:
    return lambda model, group: DistributedDataParallel(model, process_group=group, **options)


def hooked(hook: Any) -> Wrap:
    def wrap(model: nn.Module, group: Any) -> nn.Module:
        wrapped = DistributedDataParallel(model, process_group=group)
        wrapped.register_comm_hook(group, hook)
        return wrapped

    return wrap


def sharded(model: nn.Module, group: Any) -> nn.Module:
    return FullyShardedDataParallel(
        model, process_group=group, device_id=torch.device("cpu"), use_orig_params=True
    )


def sharded_by_parameter(model: nn.Module, group: Any) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    fully_shard(model, mesh=mesh)
    return model


WRAPS: dict[str, Wrap] = {
    "plain": parallel(),
    "small buckets": parallel(bucket_cap_mb=0.0001),
    "unused parameters": parallel(find_unused_parameters=True),
    "static graph": parallel(static_graph=True),
    "bucket views": parallel(gradient_as_bucket_view=True),
    "sparse gradients": parallel(),
    "allreduce hook": hooked(default_hooks.allreduce_hook),
    "half precision hook": hooked(default_hooks.fp16_compress_hook),
    "sharded": sharded,
    "sharded by parameter": sharded_by_parameter,
}


def train(name: str, group: Any, rank: int) -> list[Tensor]:
    """Takes a few steps, and returns the losses and what this rank has of the model."""
    torch.manual_seed(1)
    network = Network(has_detour=name == "unused parameters", is_sparse=name == "sparse gradients")
    model = WRAPS[name](network, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(NUM_STEPS):
        words = torch.randint(11, (4, 5), generator=generator)
        optimizer.zero_grad()
        loss = model(words, step).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(_local(one) for one in model.state_dict().values())]


def train_unevenly(group: Any, rank: int) -> list[Tensor]:
    """Lets rank 0 have more data than the others, which join it with nothing."""
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(5, 3), process_group=group)
    for divides_by_all in (True, False):
        with model.join(divide_by_initial_world_size=divides_by_all):
            for _ in range(2 if rank else 4):
                model(torch.ones(2, 5) * (rank + 1)).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _local(value: Any) -> Tensor:
    if hasattr(value, "to_local"):
        value = value.to_local()
    if hasattr(value, "local_tensor"):
        value = value.local_tensor()
    tensor: Tensor = value.detach().clone()
    return tensor
