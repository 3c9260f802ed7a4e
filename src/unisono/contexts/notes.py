"""What the engine remembers of one replica in one run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.gradients.passes import OwnPass


@dataclass(eq=False)
class ReplicaNotes:
    """What the engine remembers of a replica while it runs.

    Attributes:
        current_pass: Its backward pass, while that runs.
        num_passes: How many backward passes it has made that were reduced.
        is_without_sync: Whether it is within `no_sync()`.
        num_batch_norms: How often it has normalized a batch together with the others.
    """

    current_pass: OwnPass | None = None
    num_passes: int = 0
    is_without_sync: bool = False
    num_batch_norms: int = 0

    def forget(self) -> None:
        """After the run: lets go of what refers back to the replica."""
        self.current_pass = None
