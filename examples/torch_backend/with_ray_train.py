"""Ray Train over Unisono.

    python examples/torch_backend/with_ray_train.py      # Ray starts two workers

The process group's backend is an argument of Ray's TorchConfig.
"""

from __future__ import annotations

import tempfile
from typing import Any

import ray
import torch
from ray import train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch import distributed, nn
from torch.utils.data import DataLoader, TensorDataset


def train_on_a_worker(_: dict[str, Any]) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(16, 4)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))

    layer = nn.Linear(4, 1)
    model = prepare_model(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = prepare_data_loader(DataLoader(dataset, batch_size=8, shuffle=True))
    for _epoch in range(20):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

    with torch.no_grad():
        loss = nn.functional.mse_loss(layer(inputs), dataset.tensors[1]).item()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(layer.state_dict(), f"{folder}/layer.pt")
        metrics = {"backend": distributed.get_backend(), "loss": loss}
        train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def main() -> float:
    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=3, include_dashboard=False)
        trainer = TorchTrainer(
            train_on_a_worker,
            torch_config=TorchConfig(backend="unisono"),
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=folder),
        )
        metrics = trainer.fit().metrics
        ray.shutdown()
    assert metrics is not None
    print(f"{metrics['backend']}: loss {metrics['loss']:.6f}")
    return float(metrics["loss"])


if __name__ == "__main__":
    main()
