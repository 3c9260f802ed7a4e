"""Training on systems that lack what Linux has: no name is missed, and the result is the same."""

from __future__ import annotations

import select
import subprocess
import sys
from pathlib import Path

import pytest

from unisono import system
from unisono.errors import UnsupportedError

# As on Windows. torch itself has found out what system this is.
ELSEWHERE = """
import ctypes, os, select, socket, sys
import torch

LACKING = {
    os: ["fchmod", "fork", "forkpty", "getuid", "memfd_create", "MFD_CLOEXEC", "pread",
         "register_at_fork", "sched_getaffinity", "sched_setaffinity", "uname", "WEXITSTATUS"],
    select: ["poll", "epoll", "POLLIN", "POLLOUT"],
    socket: ["AF_UNIX", "SOCK_CLOEXEC", "SO_PEERCRED", "send_fds", "recv_fds", "TCP_USER_TIMEOUT"],
}
for module, names in LACKING.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
for name in ("fcntl", "resource", "termios", "pwd", "grp", "unisono._native"):
    sys.modules[name] = None
os.environ["USERNAME"] = "somebody"

def refuse(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc", "/sys", "/dev/shm")):
        raise FileNotFoundError(arguments[0])

def no_link(path):
    raise FileNotFoundError(path)

class NamedOnly(ctypes.CDLL):
    def __init__(self, name, *args, **kwargs):
        if name is None:
            raise TypeError("a name is needed")
        super().__init__(name, *args, **kwargs)

sys.addaudithook(refuse)
os.readlink = no_link
ctypes.CDLL = NamedOnly
"""
TRAINS = """
import unisono as uo

def train(strategy):
    torch.manual_seed(0)
    with strategy.scope():
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    def step(x):
        optimizer.zero_grad()
        loss = strategy.extended.num_replicas_in_sync ** -1 * model(x).square().sum() / 2
        loss.backward()
        optimizer.step()
        return loss.detach()

    data = torch.arange(24.0).reshape(8, 3) / 24
    for batch in strategy.experimental_distribute_dataset([data[:4], data[4:]]):
        strategy.run(step, args=(batch,))
    strategy.close()
    return model.weight.detach().clone()

for name in uo.__all__:
    getattr(uo, name)
two = train(uo.MirroredStrategy(["cpu:0", "cpu:1"]))
with uo.tracing.record("trace") as trace:
    again = train(uo.MirroredStrategy(["cpu:0", "cpu:1"]))
trace.summary()
assert torch.equal(two, again), (two, again)
from unisono.communicators.hosts import host_identity
from unisono.costs.tuning import this_machine_in_words
assert host_identity() and this_machine_in_words()["cpu"]
print(two.tolist())
"""


def test_two_replicas_train_where_everything_is_missing_that_only_linux_has(
    tmp_path: Path,
) -> None:
    found = [
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        for script in (ELSEWHERE + TRAINS, "import torch\n" + TRAINS)
    ]

    assert [one.returncode for one in found] == [0, 0], found[0].stderr + found[1].stderr
    assert found[0].stdout == found[1].stdout


def test_several_workers_without_poll_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    system.check_connections()
    monkeypatch.delattr(select, "poll")

    with pytest.raises(UnsupportedError, match="MirroredStrategy"):
        system.check_connections()


def test_shared_memory_and_interfaces_say_that_they_need_linux(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(system, "fcntl", None)

    with pytest.raises(OSError, match="takes Linux"):
        system.create_segment(4096)
    with pytest.raises(OSError, match="only Linux"):
        system.interface_address("lo")
