"""Saves and leaves when a worker is about to be ended, and resumes where it stopped.

    python examples/preemption.py --stop-after 20        # plays a platform that ends it
    python examples/preemption.py                        # goes on at step 20

    unisono launch -n 2 examples/preemption.py --replicas 2
    unisono launch -n 2 --elastic examples/preemption.py --elastic --stop-after 20

Send SIGTERM to any worker, or to the launcher: all workers finish the same step, one saves, and
all leave. The next start resumes there, and ends with the same bits as a run without a stop. It may
have another number of workers, as long as the number of replicas is the same.

With --elastic, only the worker that got SIGTERM leaves. The others take over its replicas, and end
with the same bits.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo


def main(arguments: Sequence[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--replicas", type=int, default=4, help="per worker, with --elastic of all (default: 4)"
    )
    parser.add_argument("--elastic", action="store_true", help="others go on without a worker")
    parser.add_argument("--steps", type=int, default=50, help="number of steps (default: 50)")
    parser.add_argument("--folder", type=Path, default=Path("preempted"), help="for checkpoints")
    parser.add_argument("--stop-after", type=int, help="end workers after this step")
    parser.add_argument("--exit-status", type=int, default=0, help="after a preemption")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if options.elastic:
        strategy = uo.MultiWorkerMirroredStrategy(num_replicas=options.replicas, elastic=True)
    else:
        devices = [f"cpu:{i}" for i in range(options.replicas)]
        strategy = uo.MultiWorkerMirroredStrategy(devices=devices)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)

    x = torch.randn(160, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    batches = strategy.experimental_distribute_dataset(loader)

    def on_replica(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        losses = strategy.run(on_replica, args=(x, y))
        scheduler.step()  # everything that belongs to a step is in the function
        loss: Tensor = strategy.reduce("MEAN", losses)
        return loss

    checkpoint = uo.experimental.Checkpoint(
        model=model, optimizer=optimizer, scheduler=scheduler, input=batches
    )
    handler = uo.experimental.PreemptionCheckpointHandler(
        strategy.cluster_resolver,
        checkpoint,
        options.folder,
        uo.experimental.TerminationConfig(exit_fn=lambda: sys.exit(options.exit_status)),
    )
    if strategy.is_chief:
        print(f"{strategy.num_replicas_in_sync} replicas, from step {handler.total_run_calls}")

    loss = torch.tensor(float("nan"))
    is_alone = len(strategy.extended.worker_devices) == strategy.num_replicas_in_sync
    is_ended = is_alone or not strategy.is_chief
    while handler.total_run_calls < options.steps:
        for batch in batches:
            if is_ended and handler.total_run_calls + 1 == options.stop_after:
                os.kill(os.getpid(), signal.SIGTERM)
                # A worker of an elastic job waits a second for others that get the signal, too.
                time.sleep(1.1 if options.elastic else 0.0)
            loss = handler.run(train_step, *batch)
            if handler.total_run_calls == options.steps:
                break

    weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    bits = hashlib.sha256(weights).hexdigest()[:16]
    if strategy.is_chief:
        print(f"step {handler.total_run_calls}: loss {loss:.6f}, bits {bits}", flush=True)
    handler.close()
    strategy.close()
    return bits


if __name__ == "__main__":
    main()
