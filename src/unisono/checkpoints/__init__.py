"""Saving and resuming a training, and leaving in time when its workers are about to be ended."""

from unisono.checkpoints.agreement import TerminationConfig
from unisono.checkpoints.checkpoint import Checkpoint
from unisono.checkpoints.manager import CheckpointManager
from unisono.checkpoints.preemption import PreemptionCheckpointHandler

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "PreemptionCheckpointHandler",
    "TerminationConfig",
]
