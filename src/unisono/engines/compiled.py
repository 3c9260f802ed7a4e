"""What `torch.compile` needs to know of this package."""

from __future__ import annotations

import sys
from typing import Any

_PACKAGE = __name__.partition(".")[0]
_told: list[Any] = []


def tell_compiler() -> None:
    """Keeps the compiler, if the program has loaded it, from compiling our own functions.

    What they do depends on the thread, and changes from run to run. A step that is compiled is cut
    where it calls them, and the parts in between are compiled once for all replicas.
    """
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and rules not in _told:
        _told.append(rules)
        rules.add(_PACKAGE)
