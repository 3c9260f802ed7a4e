"""Communication hooks: what happens to gradients on their way between workers."""

from unisono.hooks.bucket import GradBucket
from unisono.hooks.compress import Compress
from unisono.hooks.hook import CommHook, HookFunction
from unisono.hooks.process_group import WorkersGroup

__all__ = ["CommHook", "Compress", "GradBucket", "HookFunction", "WorkersGroup"]
