"""How the replicas of one worker run."""

from unisono.engines.ambient import Ambient
from unisono.engines.generators import KeptGenerators, RunGenerators, draw_seed
from unisono.engines.global_randomness import GlobalRandomness
from unisono.engines.guard import Guard, ReplicaStopped
from unisono.engines.interpreter import Interpreter
from unisono.engines.meeting import Recorder, ReplicaMeeting
from unisono.engines.replica_mode import ReplicaMode
from unisono.engines.threads import ReplicaThreads
from unisono.engines.turns import OneByOne, Turns

__all__ = [
    "Ambient",
    "GlobalRandomness",
    "Guard",
    "Interpreter",
    "KeptGenerators",
    "OneByOne",
    "Recorder",
    "ReplicaMeeting",
    "ReplicaMode",
    "ReplicaStopped",
    "ReplicaThreads",
    "RunGenerators",
    "Turns",
    "draw_seed",
]
