"""Ways for workers to talk to each other."""

from unisono.communicators.communicator import (
    Communicator,
    GraphEngine,
    IdentityCommunicator,
    slice_of,
)
from unisono.communicators.connect import connect
from unisono.communicators.delegating import TracedCommunicator
from unisono.communicators.greeting import JOB_TOKEN
from unisono.communicators.job_store import JobStore
from unisono.communicators.nccl import gpu_identity
from unisono.communicators.nccl_group import DTYPES as NCCL_DTYPES
from unisono.communicators.nccl_group import NcclGroup
from unisono.communicators.nodes import Node, all_reduce_nodes, nodes_of, plain_terms
from unisono.communicators.sparse import all_reduce_sparse
from unisono.communicators.stores import (
    DEFAULT_TIMEOUT_SECONDS,
    STORE_ERRORS,
    Countdown,
    coordinator_store,
    translated_store_errors,
)

__all__ = [
    "DEFAULT_TIMEOUT_SECONDS",
    "JOB_TOKEN",
    "NCCL_DTYPES",
    "STORE_ERRORS",
    "Communicator",
    "Countdown",
    "GraphEngine",
    "IdentityCommunicator",
    "JobStore",
    "NcclGroup",
    "Node",
    "TracedCommunicator",
    "all_reduce_nodes",
    "all_reduce_sparse",
    "connect",
    "coordinator_store",
    "gpu_identity",
    "nodes_of",
    "plain_terms",
    "slice_of",
    "translated_store_errors",
]
