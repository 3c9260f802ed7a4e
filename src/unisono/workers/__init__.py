"""Strategies of many workers: what a program on one host does not need."""

from unisono.workers.config import ConfigProto
from unisono.workers.connected import ConnectedWorkers
from unisono.workers.multi_worker import MultiWorkerMirroredStrategy

__all__ = ["ConfigProto", "ConnectedWorkers", "MultiWorkerMirroredStrategy"]
