"""The test classes in torch's wheel that use process groups on CPUs."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

_PACKAGE = "torch.testing._internal.distributed"


class Suite(NamedTuple):
    """One of torch's test classes.

    Attributes:
        path: The module within `torch.testing._internal.distributed`, and the class within it.
        size: The number of ranks.
        has_group: Whether the runner makes the default group. Tests of RPC make it themselves,
            where they use one at all.
    """

    path: tuple[str, str]
    size: int = 4
    has_group: bool = False

    def load(self) -> Any:
        """Imports the class."""
        set_environment(self.size)
        found: Any = importlib.import_module(f"{_PACKAGE}.{self.path[0]}")
        for name in self.path[1].split("."):
            found = getattr(found, name)
        return found


SUITES = {
    "DistributedTest": Suite(("distributed_test", "DistributedTest._DistTestBase"), has_group=True),
    "DdpUnderDistAutogradTest": Suite(
        ("ddp_under_dist_autograd_test", "DdpUnderDistAutogradTest"), size=6
    ),
    "DdpComparisonTest": Suite(("ddp_under_dist_autograd_test", "DdpComparisonTest")),
    "RpcTest": Suite(("rpc.rpc_test", "RpcTest")),
    "TensorPipeAgentRpcTest": Suite(("rpc.rpc_test", "TensorPipeAgentRpcTest")),
    "DistAutogradTest": Suite(("rpc.dist_autograd_test", "DistAutogradTest")),
    "TensorPipeAgentDistAutogradTest": Suite(
        ("rpc.dist_autograd_test", "TensorPipeAgentDistAutogradTest")
    ),
    "JitRpcTest": Suite(("rpc.jit.rpc_test", "JitRpcTest")),
}


def set_environment(size: int) -> None:
    """Sets what torch's test modules read when they are imported."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")


def modules() -> list[str]:
    """The modules that the classes are in."""
    return sorted({f"{_PACKAGE}.{suite.path[0]}" for suite in SUITES.values()})


def tests_of(suite: str) -> list[str]:
    """The names of the tests of a class that use a group, also of those that torch skips."""
    loaded = SUITES[suite].load()
    names = [name for name in dir(loaded) if name.startswith("test_")]
    return [name for name in names if SUITES[suite].has_group or _uses_group(loaded, name)]


def _uses_group(loaded: Any, name: str) -> bool:
    """Whether a method, or one that it calls, makes a group or takes part in a barrier."""
    if not inspect.isfunction(method := getattr(loaded, name, None)):
        return False
    text = inspect.getsource(inspect.unwrap(method))
    if re.search(r"initialize_pg|init_process_group|dist\.barrier|new_group", text):
        return True
    called = set(re.findall(r"self\.(\w+)\(", text)) - {name}
    return any(_uses_group(loaded, one) for one in called)


def by_suite(names: Sequence[str]) -> dict[str, list[str]]:
    """The tests to run in each class, given classes, tests as `CLASS.TEST`, or nothing for all."""
    chosen: dict[str, list[str]] = {}
    for name in names or list(SUITES):
        suite, _, test = name.partition(".")
        if suite not in SUITES:
            raise SystemExit(f"There is no class {suite!r}. Give one of: {', '.join(SUITES)}.")
        chosen.setdefault(suite, []).extend([test] if test else tests_of(suite))
    return chosen
