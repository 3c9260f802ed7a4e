"""The engine of Unisono as a backend of torch.distributed, for programs that use DDP or FSDP."""

from unisono.backend.process_group import UnisonoProcessGroup
from unisono_autoload import register

# torch has done so already, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps it from loading plugins.
register()

__all__ = ["UnisonoProcessGroup", "register"]
