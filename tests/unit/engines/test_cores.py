"""OpenMP's settings bind the program's main thread, but neither helpers nor replicas."""

import ctypes
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from unisono.kernels import native_core
from unisono.system import openmp_cores

_PROGRAM = """
import json, os, torch, unisono as uo
from unisono.kernels import native_core

def masks():
    return {task: sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}

tensors = [torch.ones(1 << 20) for _ in range(2)]  # Starts the threads of OpenMP.
before = masks()
kernel = native_core().kernel
if kernel is not None:
    kernel.reduce("sum", [tensors], [1], False, 2)
helpers = [mask for task, mask in masks().items() if task not in before]
strategy = uo.MirroredStrategy(["cpu:0", "cpu:1"])
replicas = strategy.run(lambda: frozenset(os.sched_getaffinity(0)))
print(json.dumps([masks()[str(os.getpid())], helpers, sorted(replicas.values[1])]))
"""


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two cores and a system that binds threads to them",
)
def test_openmp_binds_neither_helpers_nor_replicas_to_one_core() -> None:
    cores = sorted(os.sched_getaffinity(0))
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={**os.environ, "OMP_PROC_BIND": "true"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    main, helpers, replica = json.loads(ended.stdout)
    if len(main) > 1:
        pytest.skip("the OpenMP of this torch binds no main thread")
    assert replica == cores
    if native_core().kernel is not None:
        # A helper keeps off the core of the thread that it helps.
        assert [core for core in cores if core not in main] in helpers


def test_a_new_thread_that_asks_openmp_makes_no_class() -> None:
    # Free-threaded Python 3.13 would keep it forever.
    functions: Any = ctypes._CFuncPtr  # type: ignore[attr-defined]
    openmp_cores()
    before: set[type] = set(functions.__subclasses__())

    openmp_cores()

    assert set(functions.__subclasses__()) <= before
