"""How the replicas of one worker run."""

from unisono.engines.advice import GlobalRandomness, Interpreter
from unisono.engines.ambient import Ambient, CallerModes, ThreadState, modes_need_turns
from unisono.engines.compiled import Compilations, has_compiled, names_in, tell_compiler
from unisono.engines.generators import ReplicaGenerators, RunGenerators, identity
from unisono.engines.meeting import Recorder, ReplicaMeeting
from unisono.engines.process_wide import without_shared_caches
from unisono.engines.random_operators import drawing
from unisono.engines.threads import ReplicaThreads
from unisono.engines.turns import OneByOne, Turns

__all__ = [
    "Ambient",
    "CallerModes",
    "Compilations",
    "GlobalRandomness",
    "Interpreter",
    "OneByOne",
    "Recorder",
    "ReplicaGenerators",
    "ReplicaMeeting",
    "ReplicaThreads",
    "RunGenerators",
    "ThreadState",
    "Turns",
    "drawing",
    "has_compiled",
    "identity",
    "modes_need_turns",
    "names_in",
    "tell_compiler",
    "without_shared_caches",
]
