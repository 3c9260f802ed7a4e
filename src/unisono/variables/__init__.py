"""State that all replicas share: modules, their gradients, and what updates them."""

from unisono.variables.attributes import TORCH_TABLES, Contents, are_same, raw
from unisono.variables.creation import bring_in, creating, watch_torch
from unisono.variables.for_all import merge, once
from unisono.variables.front import plain_class
from unisono.variables.leaves import Leaves, Mark, fit_for_training, variable_of
from unisono.variables.mirrors import Mirrors
from unisono.variables.outsiders import check_backward
from unisono.variables.owners import groups_of
from unisono.variables.policy import VariableSynchronization
from unisono.variables.snapshot import Snapshot, undone
from unisono.variables.updates import Settings, sets_groups
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
