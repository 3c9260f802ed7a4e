"""Who tells a process which cluster it belongs to: one resolver for each launcher."""

from unisono.cluster.resolvers.kubernetes import KubernetesClusterResolver
from unisono.cluster.resolvers.mpi import MpiClusterResolver
from unisono.cluster.resolvers.resolver import ClusterResolver, Launch
from unisono.cluster.resolvers.simple import SimpleClusterResolver
from unisono.cluster.resolvers.slurm import SlurmClusterResolver
from unisono.cluster.resolvers.tf_config import TFConfig, TFConfigClusterResolver
from unisono.cluster.resolvers.torchrun import TorchrunClusterResolver
from unisono.cluster.resolvers.union import UnionClusterResolver

__all__ = [
    "ClusterResolver",
    "KubernetesClusterResolver",
    "Launch",
    "MpiClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfig",
    "TFConfigClusterResolver",
    "TorchrunClusterResolver",
    "UnionClusterResolver",
]
