"""What Unisono is tested with, for users to test with."""

from unisono.testing.machines import separate_memories, virtual_gpus

__all__ = ["separate_memories", "virtual_gpus"]
