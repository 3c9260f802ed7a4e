"""Many hosts with one worker each: all join and train to the bits of one process.

    python tests/stress/many_hosts.py 16 32

Hosts are network namespaces, so this needs root. Prints how many messages the busiest worker has
really sent in an all-reduce, by size, for each number of hosts.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store

sys.path.insert(0, str(Path(__file__).parents[1]))

from processes.harness import run_ranks

import unisono as uo
from unisono.communicators.network import NetworkCommunicator
from unisono.communicators.stores import tcp_store
from unisono.options import ReduceOp
from unisono_tools.benchmarks.rows import spell_bytes
from unisono_tools.namespaces import enter, make_hosts

SIZES = (64, 64 << 10, 4 << 20)
SECONDS = 300.0


def train(strategy: uo.Strategy) -> str:
    """Takes steps, in which every replica has its own numbers; returns what was learnt."""
    torch.manual_seed(0)
    with strategy.scope():
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        context = uo.get_replica_context()
        assert context is not None
        replica = context.replica_id_in_sync_group
        inputs = torch.arange(64.0).view(4, 16).add(float(replica)).sin()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    for _ in range(5):
        strategy.run(step)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def count_messages(rank: int, size: int) -> dict[int, int]:
    """Returns how many messages this rank sends in an all-reduce, by size."""
    store = tcp_store("10.83.0.1", 29401, SECONDS, is_master=rank == 0)
    counts = {}
    with NetworkCommunicator(store, rank, size, timeout_seconds=SECONDS) as communicator:
        transport: Any = communicator._link.transport
        sent: list[int] = []
        send = transport.send

        def counted(peer: int, data: torch.Tensor) -> Any:
            sent.append(peer)
            return send(peer, data)

        transport.send = counted
        for num_bytes in SIZES:
            sent.clear()
            total = torch.ones(num_bytes // 4)
            communicator.all_reduce(ReduceOp.SUM, [total])
            assert bool((total == size).all())
            counts[num_bytes] = len(sent)
        communicator.barrier()
        store.add("left", 1)
        if rank == 0:
            # The coordinator ends last.
            deadline = time.monotonic() + SECONDS
            while store.add("left", 0) < size and time.monotonic() < deadline:
                time.sleep(0.05)
    return counts


def work(_: Store, rank: int, size: int, names: list[str]) -> tuple[str, dict[int, int]]:
    """What a worker does on its host."""
    enter(names[rank])
    cluster = {"worker": [f"10.83.0.{number + 1}:29400" for number in range(size)]}
    resolver = uo.cluster_resolver.SimpleClusterResolver(cluster, task_type="worker", task_id=rank)
    options = uo.experimental.CommunicationOptions(timeout_seconds=SECONDS)
    strategy = uo.MultiWorkerMirroredStrategy(resolver, options, devices=["cpu:0"])
    learnt = train(strategy)
    strategy.close()
    return learnt, count_messages(rank, size)


def alone(_: Store, rank: int, size: int, num_replicas: int) -> str:
    """The same in one process."""
    strategy = uo.MirroredStrategy([f"cpu:{number}" for number in range(num_replicas)])
    learnt = train(strategy)
    strategy.close()
    return learnt


def main(sizes: list[int]) -> None:
    """Prints a line for each number of hosts."""
    print(f"| hosts | {' | '.join(map(spell_bytes, SIZES))} |")
    print("|---" * (len(SIZES) + 1) + "|")
    for size in sizes:
        start = time.monotonic()
        with make_hosts(size) as hosts:
            results = run_ranks(size, work, hosts.names, timeout=SECONDS)
        (expected,) = run_ranks(1, alone, size)
        assert {learnt for learnt, _ in results} == {expected}, "workers have learnt other weights"
        most = {size: max(counts[size] for _, counts in results) for size in SIZES}
        print(f"| {size} | {' | '.join(map(str, most.values()))} |", flush=True)
        print(f"{size} hosts: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(list(map(int, sys.argv[1:])) or [16, 32])
