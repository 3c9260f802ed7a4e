"""Jobs that go on with the same bits when workers come and go."""

from unisono.workers.elastic.job import ElasticJob

__all__ = ["ElasticJob"]
