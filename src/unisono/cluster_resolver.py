"""The names of `tf.distribute.cluster_resolver`, and resolvers for the launchers of PyTorch."""

from unisono.cluster import (
    ClusterResolver,
    ClusterSpec,
    KubernetesClusterResolver,
    MpiClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    UnionClusterResolver,
)

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "KubernetesClusterResolver",
    "MpiClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TorchrunClusterResolver",
    "UnionClusterResolver",
    "UnionResolver",
]

UnionResolver = UnionClusterResolver
