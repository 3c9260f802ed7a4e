"""Presses Ctrl-C while a test waits."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def ctrl_c(after: float = 0.2) -> Iterator[None]:
    """Expects the block to end with Ctrl-C, which is pressed after so many seconds.

    The block must wait for much longer. The timer starts and ends inside of what expects the
    interrupt, so a slow machine cannot bring it too early: it would end pytest itself.
    """
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(after, signal.pthread_kill, [main, signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        yield
        timer.join()
    timer.join()
