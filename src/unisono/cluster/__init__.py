"""Who is in the job: cluster specs, resolvers for each launcher, and the first meeting."""

from unisono.cluster.detection import detect
from unisono.cluster.launchers import (
    KubernetesClusterResolver,
    MpiClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    tf_config_cluster,
)
from unisono.cluster.meeting import WorkerCard, meet, was_left
from unisono.cluster.membership import Membership
from unisono.cluster.resolver import (
    ClusterResolver,
    Launch,
    SimpleClusterResolver,
    UnionClusterResolver,
)
from unisono.cluster.slurm import SlurmClusterResolver
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
    "TFConfigClusterResolver",
    "TorchrunClusterResolver",
    "UnionClusterResolver",
    "WorkerCard",
    "detect",
    "meet",
    "open_store",
    "tf_config_cluster",
    "was_left",
]
