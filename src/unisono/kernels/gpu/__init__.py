"""Batches of reductions inside the memory of a GPU, each batch in one launch."""

from unisono.kernels.gpu.launch import reduce_on_gpu, triton_status

__all__ = ["reduce_on_gpu", "triton_status"]
