"""What every test gets: a seed, a check that it leaves nothing behind, and the ways to run."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from unisono import MirroredStrategy
from unisono.backend.process_group import fits_torch
from unisono.kernels import native_core
from unisono.kernels.native import NativeCore
from unisono.testing import separate_memories

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
# What somebody has measured on this machine must not change what tests see.
os.environ["UNISONO_TUNING"] = "off"
settings.load_profile("ci" if os.environ.get("CI") else "local")
# A shell lets what it starts in the background, and all below that, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED_MEMORY = Path("/dev/shm")
# Ours, and what torch makes for this process. Other programs come and go as they like.
SHARED_MEMORY_NAMES = ("unisono", f"torch_{os.getpid()}_")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {
        "gpu": "" if torch.cuda.is_available() else "needs a CUDA device, and torch sees none",
        "backend": "" if fits_torch() else "the backend needs torch 2.7 or newer",
    }
    for item in items:
        for name, reason in missing.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Lets nobody search again all that was imported: for garbage, or for owners of parameters."""
    if len(session.items) > 1000:
        # The first optimizer imports it, which comes in a run of so many tests.
        importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def leak_police() -> Iterator[None]:
    threads = set(threading.enumerate())
    files = shared_memory_files()
    environment = environment_now()

    yield

    left = {one for one in set(threading.enumerate()) - threads if not is_of_compiler(one)}
    for one in left:
        # Libraries such as transformers do not wait for their pools. Threads of ours have names.
        if one.name.startswith("ThreadPoolExecutor-"):
            one.join(60)
    left = {one for one in left if one.is_alive()}
    assert not left, "the test left a thread running"
    assert shared_memory_files() <= files, "the test left a file in /dev/shm"
    assert environment_now() == environment, "the test left the environment changed"


def is_of_compiler(thread: threading.Thread) -> bool:
    """Whether torch's compiler has started a thread, which it keeps from then on."""
    # It shows its progress through tqdm, and torch 2.6 reads from its processes.
    return thread.name == "tqdm_monitor" or "(_read_thread)" in thread.name


def shared_memory_files() -> set[str]:
    if not SHARED_MEMORY.is_dir():
        return set()
    return {name for name in os.listdir(SHARED_MEMORY) if name.startswith(SHARED_MEMORY_NAMES)}


def environment_now() -> dict[str, str]:
    # pytest keeps the name of the running test there, torch's compiler its folder once loaded, and
    # scikit-learn the settings of OpenMP.
    others = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_")
    return {name: text for name, text in os.environ.items() if not name.startswith(others)}


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test through the native core, and through torch alone."""
    chosen = str(request.param)
    if chosen == "native" and native_core().kernel is None:
        pytest.skip(f"there is no native core: {native_core().status}")
    if chosen == "torch":
        turn_native_off(monkeypatch)
    return chosen


def turn_native_off(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [module for name, module in sys.modules.items() if name.startswith("unisono")]
    for module in ours:
        if getattr(module, "native_core", None) is native_core:
            off = NativeCore("off for this test")
            monkeypatch.setattr(module, "native_core", lambda off=off: off)


@pytest.fixture(params=["shared", "separate"])
def memories(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test with CPU devices that share the host's memory, and with one memory each."""
    if request.param == "shared":
        yield "shared"
        return
    with separate_memories():
        yield "separate"


@pytest.fixture
def mirrored() -> Iterator[Callable[..., MirroredStrategy]]:
    """Makes strategies of CPU replicas, whose threads end with the test."""
    made: list[MirroredStrategy] = []

    def make(num_replicas: int = 2, **options: Any) -> MirroredStrategy:
        made.append(MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)], **options))
        return made[-1]

    yield make
    for strategy in made:
        strategy.close()
