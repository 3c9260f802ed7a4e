"""How large packs of gradients are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

# Without constants: small enough that the first packs are reduced early in the pass, large enough
# that there are few.
BYTES_PER_PACK = 4 << 20
# For smaller packs, costs that the model leaves out matter: hooks, threads that wake up.
_LEAST_BYTES = 64 << 10
# A size at which latencies do not matter.
_FAR_BYTES = 1 << 40


class Line(NamedTuple):
    """Seconds as a linear function of bytes."""

    latency: float
    per_byte: float

    @classmethod
    def through(cls, seconds: Callable[[float], float]) -> Line:
        """Returns the line from an empty tensor to a huge one, given the seconds for some bytes."""
        latency = seconds(0)
        return cls(latency, (seconds(_FAR_BYTES) - latency) / _FAR_BYTES)

    def seconds(self, num_bytes: float) -> float:
        """Returns the seconds for this number of bytes."""
        return self.latency + self.per_byte * num_bytes


def best_bytes_per_pack(cost: Line | None, total_bytes: int) -> int:
    """Returns the best size of packs for the gradients of a model.

    A pack costs a latency `a` and `b` seconds per byte. N bytes of gradients in packs of m bytes
    cost N / m latencies. The last pack is full when the backward pass ends, so its m b seconds
    overlap with nothing. N / m a + m b is least for m = sqrt(N a / b).

    Args:
        cost: The cost of reducing a pack, or None if it is not known.
        total_bytes: The gradients of one replica.
    """
    if cost is None or cost.per_byte <= 0:
        return BYTES_PER_PACK
    return max(_LEAST_BYTES, round(math.sqrt(total_bytes * cost.latency / cost.per_byte)))
