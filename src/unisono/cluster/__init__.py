"""Who is in the job: cluster specs, resolvers for each launcher, and the first meeting."""

from unisono.cluster.card import WorkerCard
from unisono.cluster.detection import detect
from unisono.cluster.meeting import meet, was_left
from unisono.cluster.membership import Membership
from unisono.cluster.resolvers.kubernetes import KubernetesClusterResolver
from unisono.cluster.resolvers.mpi import MpiClusterResolver
from unisono.cluster.resolvers.resolver import ClusterResolver, Launch
from unisono.cluster.resolvers.simple import SimpleClusterResolver
from unisono.cluster.resolvers.slurm import SlurmClusterResolver
from unisono.cluster.resolvers.tf_config import TFConfig, TFConfigClusterResolver
from unisono.cluster.resolvers.torchrun import TorchrunClusterResolver
from unisono.cluster.resolvers.union import UnionClusterResolver
from unisono.cluster.spec import Address, ClusterSpec
from unisono.cluster.store import open_store

__all__ = [
    "Address",
    "ClusterResolver",
    "ClusterSpec",
    "KubernetesClusterResolver",
    "Launch",
    "Membership",
    "MpiClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfig",
    "TFConfigClusterResolver",
    "TorchrunClusterResolver",
    "UnionClusterResolver",
    "WorkerCard",
    "detect",
    "meet",
    "open_store",
    "was_left",
]
