"""All-reduce between hosts: what the cost model predicts, and what is measured.

    python benchmarks/predictions.py --rate 1gbit

Hosts are network namespaces with two ranks each, so this needs root. As `unisono tune` does, ranks
first measure their links, between two of them at a time, and then all-reduces between all of them.
From these come the predictions for sizes in between, as `unisono plan` makes them: by the model
alone, and corrected by the all-reduces of all ranks. Prints a table.
"""

import argparse
import os
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from unisono.communicators import connect
from unisono.costs import Cluster, Tuning
from unisono_tools.benchmarks.peers.crew import DEADLINE_S, Crew
from unisono_tools.benchmarks.rows import spell_bytes
from unisono_tools.namespaces import enter, make_hosts
from unisono_tools.planning.model import Model
from unisono_tools.pricing import running, seconds_of
from unisono_tools.tables import spell_seconds
from unisono_tools.tuning.measured import fitted, runs_of
from unisono_tools.tuning.rank_sweeps import cluster_sweep, rank_sweeps
from unisono_tools.tuning.sweeps import all_reduce_sweep, local_sweep

FITTED = [4**power for power in range(5, 12)]
CHECKED = [2 * size for size in FITTED[:-1]]


def work(rank: int, size: int, pipe: Connection, names: list[str], seconds: float) -> None:
    enter(names[rank * len(names) // size])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    limit = timedelta(seconds=DEADLINE_S)
    store = TCPStore("10.83.0.1", 29400, None, rank == 0, limit, wait_for_workers=False)
    place = PrefixStore("links", store), rank, size, FITTED, seconds
    rows = list(rank_sweeps(*place))
    if rank == 0:
        rows += local_sweep(FITTED, seconds)
    pipe.recv()
    pipe.send(rows)
    _, tuning = pipe.recv()
    pipe.send(list(cluster_sweep(*place, tuning)))
    pipe.recv()
    with connect(
        PrefixStore("check", store), rank, size, timeout_seconds=DEADLINE_S, tuning=tuning
    ) as communicator:
        found = list(all_reduce_sweep("whole", communicator, CHECKED, seconds))
        communicator.barrier()
    pipe.send(found)
    pipe.recv()
    if rank == 0:
        # The coordinator ends last.
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--rate", help="what a host may send, such as 1gbit")
    parser.add_argument("--seconds", type=float, default=0.05, help="for each size")
    options = parser.parse_args()
    size = options.hosts * options.ranks_per_host
    with make_hosts(options.hosts) as hosts:
        if options.rate:
            hosts.slow_down(options.rate)
        crew = Crew("ranks", size, work, hosts.names, options.seconds)
        try:
            rows = crew.ask("links")[0]
            links, sum_rate = fitted(rows)
            tuning = Tuning(
                **{"loopback": None, "inside": None, **links},  # type: ignore[arg-type]
                sum_rate=sum_rate,
                machine={},
                date="",
                version="",
            )
            rows += crew.ask("cluster", tuning)[0]
            by_rank = crew.ask("check")
        finally:
            crew.close()
    between = links["tcp" if tuning.is_tcp_faster else "between"]
    inside = links.get("inside", between)
    shape = options.hosts, options.ranks_per_host
    model = Model(Cluster(*shape, inside, between, sum_rate), runs_of(rows))
    print(f"{'TCP' if tuning.is_tcp_faster else 'Gloo'} between hosts\n")
    print("| size | algorithm | measured | by the model alone | corrected |")
    print("|---" * 5 + "|")
    for checked in zip(*by_rank, strict=True):
        num_bytes: int = checked[0].num_bytes
        measured = max(row.seconds for row in checked)
        name, phases = running(model.cluster, num_bytes)
        predicted = (
            seconds_of(phases, model.cluster, num_bytes),
            model.seconds(phases, num_bytes),
        )
        errors = " | ".join(f"{one / measured - 1:+.0%}" for one in predicted)
        print(f"| {spell_bytes(num_bytes)} | {name} | {spell_seconds(measured)} | {errors} |")


if __name__ == "__main__":
    main()
