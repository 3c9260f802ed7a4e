"""State that all replicas share: modules, their gradients, and what updates them."""

from unisono.variables.assignable import Component
from unisono.variables.containers import variable_of
from unisono.variables.creation import bring_in, creating, watch_torch
from unisono.variables.for_all import merge, once
from unisono.variables.gradients import GradientReducer
from unisono.variables.leaves import Leaves
from unisono.variables.mirrors import Mirrors
from unisono.variables.policy import VariableSynchronization
from unisono.variables.undoing import undone
from unisono.variables.variable import Variable
from unisono.variables.worker_gradients import WorkerGradientReducer

__all__ = [
    "Component",
    "GradientReducer",
    "Leaves",
    "Mirrors",
    "Variable",
    "VariableSynchronization",
    "WorkerGradientReducer",
    "bring_in",
    "creating",
    "merge",
    "once",
    "undone",
    "variable_of",
    "watch_torch",
]
