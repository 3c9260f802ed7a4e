"""Captures that all workers make together, so that their graphs hold what they exchange.

NCCL's collectives may be in the graphs of all workers or of none. So before each call, the workers
tell each other what they could do. If all could replay what they have captured together, they do,
and if all could capture, they do. Otherwise each replays its own graphs, and Python exchanges
between two of them.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from unisono.errors import CommunicationError, UnequalCollectivesError
from unisono.reductions import Workers

if TYPE_CHECKING:
    from unisono.communicators import GraphEngine

# What workers can agree on, besides the numbers of captures.
NOTHING, CAPTURE = 0, 1


class Together:
    """What the workers of a strategy capture together.

    Attributes:
        engine: What carries the collectives in the graphs.
    """

    def __init__(self, workers: Workers, engine: GraphEngine) -> None:
        self.engine = engine
        self._workers = workers
        self._last = CAPTURE

    def agreed(self, number: int, can_capture: bool) -> int:  # noqa: FBT001
        """Returns what all workers do now.

        Args:
            number: Of the capture that this worker could replay; `NOTHING` if there is none.
        """
        self.engine.check_usable("A captured step")
        told = self._workers.gather(torch.tensor([number, can_capture]))
        numbers = {int(one[0]) for one in told}
        if numbers == {number} and number != NOTHING:
            return number
        return CAPTURE if all(one[1] for one in told) else NOTHING

    def next_number(self) -> int:
        """Returns the number of a capture that has just been made, on all workers."""
        self._last += 1
        return self._last

    def end_part(self) -> None:
        """Waits until all workers have captured a part; raises if one has failed."""
        self.engine.agree("the end of a capture")

    def has_failed(self, error: Exception) -> bool:
        """After an error in a capture: whether no worker can capture this, and all know it now."""
        if isinstance(error, UnequalCollectivesError):
            # All have got it. Perhaps one has told that it has failed.
            return True
        if isinstance(error, CommunicationError):
            return False
        with suppress(UnequalCollectivesError):
            self.engine.agree("a failed capture")
        return True
