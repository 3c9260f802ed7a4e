"""Communication hooks: what happens to gradients on their way between workers."""

from unisono.hooks.compress import Compress
from unisono.hooks.hook import GradBucket
from unisono.hooks.process_group import WorkersGroup

__all__ = ["Compress", "GradBucket", "WorkersGroup"]
