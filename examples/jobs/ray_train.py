"""Starts `train.py` on the workers of a Ray cluster.

    python examples/jobs/ray_train.py        # two workers on this machine, or on your cluster

Ray Train starts the workers and connects them. `MultiWorkerMirroredStrategy` uses that connection
to find the other workers. Needs `pip install "ray[train]"`.
"""

from __future__ import annotations

import runpy
import secrets
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchTrainer

PROGRAM = Path(__file__).with_name("train.py")


def train_on_a_worker(_: dict[str, Any]) -> None:
    runpy.run_path(str(PROGRAM))["main"]([])  # or the arguments of train.py


def main() -> None:
    # A secret of this job: without it, anyone who reaches the first worker could join.
    variables = {"UNISONO_JOB_TOKEN": secrets.token_hex(32)}
    ray.init(runtime_env={"env_vars": variables})
    trainer = TorchTrainer(
        train_on_a_worker,
        scaling_config=ray.train.ScalingConfig(num_workers=2),  # use_gpu=True on GPUs
    )
    trainer.fit()  # raises the error of a worker that fails
    ray.shutdown()


if __name__ == "__main__":
    main()
