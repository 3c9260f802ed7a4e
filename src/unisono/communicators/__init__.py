"""Ways for workers to talk to each other."""

from unisono.communicators.communicator import Communicator, slice_of
from unisono.communicators.connect import connect
from unisono.communicators.identity import IdentityCommunicator
from unisono.communicators.sparse import all_reduce_sparse
from unisono.communicators.stores import (
    DEFAULT_TIMEOUT_SECONDS,
    STORE_ERRORS,
    translated_store_errors,
)

__all__ = [
    "DEFAULT_TIMEOUT_SECONDS",
    "STORE_ERRORS",
    "Communicator",
    "IdentityCommunicator",
    "all_reduce_sparse",
    "connect",
    "slice_of",
    "translated_store_errors",
]
