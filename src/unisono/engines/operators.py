"""Operators of torch as Python sees them, each of which several replicas may use first.

torch makes the Python object of an operator when it is first needed. If two threads need it at the
same time, torch makes two, and Python keeps the second. C++ may keep the address of the first,
which Python frees. Modes for operators then get whatever comes to lie there, or the process
crashes.
"""

from __future__ import annotations

import threading
from typing import Any

from torch._ops import OpOverloadPacket, _OpNamespace

from unisono.sharing import computed_once, in_place_of
from unisono.system import after_fork_in_child

_lock: Any = threading.RLock()
# Another thread may hold it when a process is forked. Where none can be, it has no such method.
after_fork_in_child(lambda: _lock._at_fork_reinit())


@computed_once
def make_operators_once() -> None:
    """From now on, all threads get the same object for an operator."""
    for owner in (_OpNamespace, OpOverloadPacket):
        _make_once(owner)


def _make_once(owner: Any) -> None:
    make = owner.__getattr__

    @in_place_of(owner, "__getattr__")
    def made_once(holder: Any, name: str) -> Any:
        with _lock:
            # Another thread may have made it meanwhile.
            found = vars(holder).get(name)
            return make(holder, name) if found is None else found
