"""State that all replicas share: modules, their gradients, and what updates them."""

from unisono.modules.attributes import TORCH_TABLES, Contents, are_same, raw
from unisono.modules.creation import bring_in, creating, watch_torch
from unisono.modules.for_all import merge, once
from unisono.modules.front import plain_class
from unisono.modules.leaves import Leaves, Mark, fit_for_training, variable_of
from unisono.modules.mirrors import Mirrors
from unisono.modules.outsiders import check_backward
from unisono.modules.owners import groups_of
from unisono.modules.snapshot import Snapshot, undone
from unisono.modules.updates import Settings, sets_groups
from unisono.variables.policy import VariableSynchronization
from unisono.variables.variable import Variable
from unisono.variables.writes import Component

__all__ = [
    "TORCH_TABLES",
    "Component",
    "Contents",
    "Leaves",
    "Mark",
    "Mirrors",
    "Settings",
    "Snapshot",
    "Variable",
    "VariableSynchronization",
    "are_same",
    "bring_in",
    "check_backward",
    "creating",
    "fit_for_training",
    "groups_of",
    "merge",
    "once",
    "plain_class",
    "raw",
    "sets_groups",
    "undone",
    "variable_of",
    "watch_torch",
]
