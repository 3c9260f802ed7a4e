"""Ways for workers to talk to each other."""

from unisono.communicators.choice import Carrier, Choice, Engine, choose
from unisono.communicators.communicator import Communicator, slice_of
from unisono.communicators.connect import connect
from unisono.communicators.hosts import Layout
from unisono.communicators.identity import IdentityCommunicator
from unisono.communicators.nccl import gpu_identity
from unisono.communicators.sparse import all_reduce_sparse
from unisono.communicators.stores import (
    DEFAULT_TIMEOUT_SECONDS,
    STORE_ERRORS,
    Countdown,
    have_come,
    translated_store_errors,
)
from unisono.communicators.torch_ops import own_op
from unisono.communicators.traced import TracedCommunicator

__all__ = [
    "DEFAULT_TIMEOUT_SECONDS",
    "STORE_ERRORS",
    "Carrier",
    "Choice",
    "Communicator",
    "Countdown",
    "Engine",
    "IdentityCommunicator",
    "Layout",
    "TracedCommunicator",
    "all_reduce_sparse",
    "choose",
    "connect",
    "gpu_identity",
    "have_come",
    "own_op",
    "slice_of",
    "translated_store_errors",
]
