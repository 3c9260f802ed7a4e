"""How large the packs of gradients are.

A pack costs a latency `a` and `b` seconds a byte. The packs of N bytes of gradients, m bytes each,
cost N / m latencies. The last one is full when the backward pass ends, so its m b seconds are not
hidden behind anything. N / m a + m b is least for

    m = sqrt(N a / b)
"""

from __future__ import annotations

import math

from unisono.costs.links import Line

# Without constants: small enough that the first packs are reduced early in the pass, large enough
# that there are few.
BYTES_PER_PACK = 4 << 20
# Below, what is not in the model counts: hooks, threads that wake up.
_LEAST_BYTES = 64 << 10


def best_bytes_per_pack(cost: Line | None, total_bytes: int) -> int:
    """Returns the size of packs for so many bytes of gradients.

    Args:
        cost: What the reduction of a pack costs; None if that is not known.
        total_bytes: The gradients of one replica.
    """
    if cost is None or cost.per_byte <= 0:
        return BYTES_PER_PACK
    return max(_LEAST_BYTES, round(math.sqrt(total_bytes * cost.latency / cost.per_byte)))
