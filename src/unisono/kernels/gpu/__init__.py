"""Batches of reductions inside the memory of a GPU, each batch in one launch."""

from unisono.kernels.gpu.launch import TableArena, reduce_on_gpu, triton_status

__all__ = ["TableArena", "reduce_on_gpu", "triton_status"]
