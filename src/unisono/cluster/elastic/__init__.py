"""The workers of an elastic job, which go on when some of them are lost, and let new ones in."""

from unisono.cluster.elastic.members import ElasticMembers, Met

__all__ = ["ElasticMembers", "Met"]
