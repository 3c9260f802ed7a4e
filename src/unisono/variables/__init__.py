"""`Variable`: a tensor that all replicas of a strategy share, as in TensorFlow."""

from unisono.variables.policy import VariableSynchronization
from unisono.variables.variable import Variable

__all__ = ["Variable", "VariableSynchronization"]
