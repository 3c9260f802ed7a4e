"""Kills workers in the middle of training; the others end with the bits of an undisturbed run.

    python examples/elastic.py                                # three workers, of which one is left
    python examples/elastic.py --workers 4 --kill 3 --kill 0  # the killed ones, in this order

It starts workers on this host, and kills one after the other with SIGKILL. The survivors take
over the replicas of the lost workers. At the end, it trains again in one process that nobody
disturbs, and compares the weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo

NUM_REPLICAS = 4


def train(strategy: uo.Strategy, num_epochs: int) -> str:
    """Trains, says when a step is done, and returns a fingerprint of the weights."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 16, generator=generator)
    labels = (inputs.square().sum(1) > 16).long()
    torch.manual_seed(2)
    with strategy.scope():
        model = nn.Sequential(
            nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 2)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    loader = DataLoader(TensorDataset(inputs, labels), batch_size=32, shuffle=True)
    batches = strategy.experimental_distribute_dataset(loader)
    for _ in range(num_epochs):
        for batch in batches:
            loss = strategy.reduce("MEAN", strategy.run(step, args=batch))
            print(f"loss {loss:.4f}", flush=True)
    bits = b"".join(one.numpy().tobytes() for one in model.state_dict().values())
    return hashlib.sha256(bits).hexdigest()[:16]


def work(num_epochs: int) -> str:
    """What each worker does."""
    strategy = uo.MultiWorkerMirroredStrategy(num_replicas=NUM_REPLICAS, elastic=True)
    try:
        digest = train(strategy, num_epochs)
        print(f"weights {digest}", flush=True)
        return digest
    finally:
        strategy.close()


def start(num_workers: int, num_epochs: int) -> list[subprocess.Popen[str]]:
    """Starts workers on this host."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num_workers)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    command = [sys.executable, __file__, "--as-worker", "--epochs", str(num_epochs)]
    started = []
    for rank in range(num_workers):
        task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        environment = os.environ | {"TF_CONFIG": json.dumps(task), "OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    return started


def demonstrate(num_workers: int, victims: Sequence[int], num_epochs: int) -> tuple[str, set[str]]:
    """Kills workers while they train, and returns the weights without and with that."""
    workers = start(num_workers, num_epochs)
    try:
        left = [worker for i, worker in enumerate(workers) if i not in victims]
        for victim in victims:
            # Some steps later, however fast they are.
            for _ in range(5):
                print(f"worker {victim}: {_line_of(workers[victim])}")
            print(f"killing worker {victim}")
            workers[victim].kill()
        ends = [worker.communicate(timeout=120)[0].split()[-1] for worker in left]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    strategy = uo.MultiWorkerMirroredStrategy(num_replicas=NUM_REPLICAS)
    try:
        expected = train(strategy, num_epochs)
    finally:
        strategy.close()
    return expected, set(ends)


def _line_of(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


def main(arguments: Sequence[str] | None = None) -> tuple[str, set[str]] | str:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--kill", type=int, action="append")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--as-worker", action="store_true")
    options = parser.parse_args(arguments)
    if options.as_worker:
        return work(options.epochs)
    victims = [2, 0] if options.kill is None else options.kill
    expected, found = demonstrate(options.workers, victims, options.epochs)
    print(f"undisturbed: {expected}; with lost workers: {', '.join(sorted(found))}")
    return expected, found


if __name__ == "__main__":
    main()
