"""The cost model, corrected by what whole all-reduces took on a cluster that was measured.

The model adds up messages and sums. It leaves out processes that compete for cores, caches, and
sums that overlap with messages. What that amounts to shows where Unisono's all-reduce was measured
between all ranks: the ratio of measured and modeled time, by size, corrects all predictions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from unisono.costs import Cluster, Run
from unisono_tools.pricing import Phase, running, seconds_of


class Model:
    """Predicts seconds on a cluster.

    Args:
        cluster: The cluster, and what its links cost.
        runs: What was measured over these links. The one whose cluster is most alike counts.

    Attributes:
        cluster: The cluster.
        run: What corrects the model; None if nothing does.
    """

    def __init__(self, cluster: Cluster, runs: Sequence[Run] = ()) -> None:
        self.cluster = cluster
        alike = [run for run in runs if (run.num_hosts == 1) == (cluster.num_hosts == 1)]
        self.run = min(alike, key=self._distance, default=None)
        if self.run is None:
            return
        sizes, seconds = zip(*self.run.times, strict=True)
        there = replace(
            cluster, num_hosts=self.run.num_hosts, ranks_per_host=self.run.ranks_per_host
        )
        modeled = [seconds_of(running(there, size)[1], there, size) for size in sizes]
        self._sizes = np.log(sizes)
        self._factors = np.log(seconds) - np.log(modeled)

    def seconds(self, phases: tuple[Phase, ...], num_bytes: float) -> float:
        """Returns how long the `phases` of an algorithm take for `num_bytes` per rank."""
        seconds = seconds_of(phases, self.cluster, num_bytes)
        if self.run is None:
            return seconds
        size = math.log(max(num_bytes, 1))
        return seconds * math.exp(float(np.interp(size, self._sizes, self._factors)))

    def _distance(self, run: Run) -> float:
        """How different the shape of a cluster that was measured is."""
        hosts = math.log(run.num_hosts / self.cluster.num_hosts)
        ranks = math.log(run.ranks_per_host / self.cluster.ranks_per_host)
        return abs(hosts) + abs(ranks)
