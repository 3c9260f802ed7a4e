"""Accelerate over Unisono.

    torchrun --nproc-per-node 2 examples/torch_backend/with_accelerate.py

On CPUs, `InitProcessGroupKwargs` accepts only Accelerate's own backends. Accelerate keeps a process
group that already exists, so the program creates the group first.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> float:
    distributed.init_process_group("unisono")  # before the Accelerator
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    inputs = torch.randn(16, 4)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(20):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()

    with torch.no_grad():
        plain = accelerator.unwrap_model(model)
        loss = nn.functional.mse_loss(plain(inputs), dataset.tensors[1]).item()
    accelerator.print(f"{distributed.get_backend()}: loss {loss:.6f}")
    accelerator.end_training()  # also destroys the process group
    return loss


if __name__ == "__main__":
    main()
