"""State that all replicas share: modules, their gradients, and what updates them."""

from unisono.variables.assignable import Component
from unisono.variables.attributes import Contents, raw
from unisono.variables.batch_norm import synchronized_batch_norm
from unisono.variables.containers import variable_of
from unisono.variables.creation import bring_in, creating, watch_torch
from unisono.variables.for_all import merge, once
from unisono.variables.leaves import Leaves, Mark
from unisono.variables.mirrors import Mirrors
from unisono.variables.outsiders import Outsiders
from unisono.variables.policy import VariableSynchronization
from unisono.variables.settings import Settings
from unisono.variables.undoing import undone
from unisono.variables.variable import Variable

__all__ = [
    "Component",
    "Contents",
    "Leaves",
    "Mark",
    "Mirrors",
    "Outsiders",
    "Settings",
    "Variable",
    "VariableSynchronization",
    "bring_in",
    "creating",
    "merge",
    "once",
    "raw",
    "synchronized_batch_norm",
    "undone",
    "variable_of",
    "watch_torch",
]
