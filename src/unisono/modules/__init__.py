"""State that all replicas share: modules, their gradients, and what updates them."""

from unisono.modules.attributes import TORCH_TABLES, Contents, are_same, raw
from unisono.modules.creation import bring_in, creating, watch_torch
from unisono.modules.for_all import merge, once
from unisono.modules.front import plain_class
from unisono.modules.leaves import (
    AnyVariable,
    Leaves,
    Mark,
    fit_for_training,
    is_variable,
    variable_of,
)
from unisono.modules.mirrors import Mirrors
from unisono.modules.outsiders import check_backward
from unisono.modules.owners import groups_of
from unisono.modules.updates import Settings, sets_groups

__all__ = [
    "TORCH_TABLES",
    "AnyVariable",
    "Contents",
    "Leaves",
    "Mark",
    "Mirrors",
    "Settings",
    "are_same",
    "bring_in",
    "check_backward",
    "creating",
    "fit_for_training",
    "groups_of",
    "is_variable",
    "merge",
    "once",
    "plain_class",
    "raw",
    "sets_groups",
    "variable_of",
    "watch_torch",
]
