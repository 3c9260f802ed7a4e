"""DistributedDataParallel over Unisono, started by torchrun.

    torchrun --nproc-per-node 2 examples/torch_backend/with_torchrun.py

The only difference from a program over Gloo is the name of the backend.
"""

from __future__ import annotations

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> float:
    distributed.init_process_group("unisono")
    torch.manual_seed(0)
    inputs = torch.randn(16, 4)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)

    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(20):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

    with torch.no_grad():
        loss = nn.functional.mse_loss(model.module(inputs), dataset.tensors[1]).item()
    if distributed.get_rank() == 0:
        print(f"{distributed.get_backend()}: loss {loss:.6f}")
    distributed.destroy_process_group()
    return loss


if __name__ == "__main__":
    main()
