import threading
import time
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def loader_threads_end() -> Iterator[None]:
    """A loader with workers closes its queues, whose threads end a moment later."""
    yield
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and any(
        thread.name == "QueueFeederThread" for thread in threading.enumerate()
    ):
        time.sleep(0.005)
