"""Presses Ctrl-C while a test waits."""

import signal
import threading
from collections.abc import Callable

import pytest


def press_ctrl_c_in(call: Callable[[], object], after: float = 0.2) -> None:
    """Makes a call, and expects it to end with Ctrl-C, which is pressed after so many seconds.

    The call must wait for much longer. The timer starts inside of what expects the interrupt, so a
    slow machine cannot bring it too early: it would end pytest itself.
    """
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(after, signal.pthread_kill, [main, signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        call()
        timer.join()
    timer.join()
