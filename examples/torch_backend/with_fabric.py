"""Lightning Fabric over Unisono.

    python examples/torch_backend/with_fabric.py      # Fabric starts the second process

The process group's backend is an argument of Fabric's DDPStrategy.
"""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> float:
    strategy = DDPStrategy(process_group_backend="unisono")
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    inputs = torch.randn(16, 4)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))

    layer = nn.Linear(4, 1)
    model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=8, shuffle=True))
    for _ in range(20):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()

    with torch.no_grad():
        loss = nn.functional.mse_loss(layer(inputs), dataset.tensors[1]).item()
    fabric.print(f"{distributed.get_backend()}: loss {loss:.6f}")
    return loss


if __name__ == "__main__":
    main()
