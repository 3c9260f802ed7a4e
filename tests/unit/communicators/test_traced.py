"""A communicator whose collectives are recorded is otherwise the one that carries them."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from conformance.communicator_cases import failed_cases
from thread_ranks import make_threads

from unisono import tracing
from unisono.communicators import Communicator, TracedCommunicator
from unisono.communicators.delegating import DelegatingCommunicator

SOME = slice(0, None, 7)


def test_every_method_is_passed_on() -> None:
    """One that is not would go the long way of the base class."""
    own = [
        name
        for name, value in vars(Communicator).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]

    # These only call others, or are asked of what is inside a host, which is never recorded itself.
    assert {name for name in own if name not in vars(DelegatingCommunicator)} == {
        "within",
        "check_root",
        "reduce_parts",
        "share_parts",
        "lead",
    }


def test_collectives_do_what_they_do_unrecorded_and_are_recorded(tmp_path: Path) -> None:
    carriers = make_threads(3, timeout_seconds=30)
    traced = [TracedCommunicator(carrier, group=1) for carrier in carriers]
    with tracing.record(tmp_path / "trace") as trace, ThreadPoolExecutor(3) as pool:
        failed = list(pool.map(lambda one: failed_cases(one, SOME), traced))

    assert failed == [[]] * 3
    (worker,) = trace.workers()
    kinds = {event.name for event in worker.events() if event.category == "collective"}
    assert {"all_reduce", "all_to_all", "all_gather", "broadcast"} <= kinds
