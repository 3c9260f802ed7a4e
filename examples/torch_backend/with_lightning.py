"""Lightning's Trainer over Unisono.

    python examples/torch_backend/with_lightning.py      # Lightning starts the second process

The process group's backend is an argument of Lightning's DDPStrategy.
"""

from __future__ import annotations

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, distributed, nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    """A linear layer that learns to add up its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> float:
    torch.manual_seed(0)
    inputs = torch.randn(16, 4)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="unisono"),
        max_epochs=20,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(dataset, batch_size=8, shuffle=True))

    with torch.no_grad():
        loss = nn.functional.mse_loss(model.layer(inputs), dataset.tensors[1]).item()
    if trainer.is_global_zero:
        print(f"{distributed.get_backend()}: loss {loss:.6f}")
    return loss


if __name__ == "__main__":
    main()
