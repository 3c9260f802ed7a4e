"""The training program that the jobs in this folder start on every worker.

    python examples/jobs/train.py                        # one worker
    unisono launch -n 2 examples/jobs/train.py --checkpoint job

It learns to add up numbers. With a folder for checkpoints, it saves after every epoch. At SIGTERM
or SIGUSR1, all workers finish the same step, save, and leave with status 42: start it again, and
it resumes there.
"""

from __future__ import annotations

import argparse
import functools
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo

# What tells the job scripts that the training is to go on.
PREEMPTED = 42


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=int, default=5, help="number of epochs (default: 5)")
    parser.add_argument("--checkpoint", type=Path, help="a folder that all workers can read")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    strategy = uo.MultiWorkerMirroredStrategy()  # finds the launcher and the other workers
    with strategy.scope():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    inputs = torch.randn(128, 4, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = DataLoader(dataset, batch_size=16, shuffle=True)  # 16 over all workers
    batches = strategy.experimental_distribute_dataset(loader)

    run, num_steps, loss = strategy.run, 0, float("nan")
    if options.checkpoint is not None:
        checkpoint = uo.experimental.Checkpoint(model=model, optimizer=optimizer, input=batches)
        manager = uo.experimental.CheckpointManager(checkpoint, options.checkpoint, max_to_keep=2)
        handler = uo.experimental.PreemptionCheckpointHandler(
            strategy.cluster_resolver,
            manager,
            termination_config=uo.experimental.TerminationConfig(
                termination_watcher_fn=signal.SIGUSR1, exit_fn=lambda: sys.exit(PREEMPTED)
            ),
        )
        num_steps = handler.total_run_calls  # of the newest checkpoint
        run = functools.partial(handler.run, strategy.run)

    while num_steps < options.epochs * len(batches):
        for batch in batches:
            loss = strategy.reduce("MEAN", run(step, batch)).item()
            num_steps += 1
            if num_steps % len(batches) == 0 and strategy.is_chief:  # one worker prints
                epoch, count = num_steps // len(batches), strategy.num_replicas_in_sync
                print(f"epoch {epoch}, {count} replicas: loss {loss:.6f}", flush=True)
        if options.checkpoint is not None:
            manager.save()  # all workers call it, and one writes
    strategy.close()
    return loss


if __name__ == "__main__":
    main()
