"""Communicators as process groups of torch.distributed."""

from unisono.groups.collectives import tensors_in
from unisono.groups.process_group import CommunicatorGroup, Movement
from unisono.groups.work import CollectiveWork

__all__ = ["CollectiveWork", "CommunicatorGroup", "Movement", "tensors_in"]
