"""How the replicas of one worker run."""

from unisono.engines.advice import GlobalRandomness, Interpreter
from unisono.engines.ambient import Ambient, CallerThread, modes_need_turns
from unisono.engines.compiled import Compilations, tell_compiler
from unisono.engines.generators import ReplicaGenerators, RunGenerators
from unisono.engines.meeting import Recorder, ReplicaMeeting
from unisono.engines.random_operators import drawing
from unisono.engines.threads import ReplicaThreads
from unisono.engines.turns import OneByOne, Turns

__all__ = [
    "Ambient",
    "CallerThread",
    "Compilations",
    "GlobalRandomness",
    "Interpreter",
    "OneByOne",
    "Recorder",
    "ReplicaGenerators",
    "ReplicaMeeting",
    "ReplicaThreads",
    "RunGenerators",
    "Turns",
    "drawing",
    "modes_need_turns",
    "tell_compiler",
]
