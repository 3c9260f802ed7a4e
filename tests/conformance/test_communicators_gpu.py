"""Collectives of GPU tensors: through host memory, and through NCCL."""

from __future__ import annotations

import os

import pytest
import torch
from conformance.communicator_cases import drawn
from processes.harness import run_ranks
from torch._C._distributed_c10d import PrefixStore, Store

from unisono.communicators.communicator import Communicator, IdentityCommunicator
from unisono.communicators.connect import connect
from unisono.communicators.delegating import StagedCommunicator
from unisono.communicators.nccl import NcclCommunicator
from unisono.communicators.network import NetworkCommunicator
from unisono.kernels import tree_reduce
from unisono.options import CommunicationImplementation, ReduceOp

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*use of fork")]

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.complex64]
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 7), (70_001,)]


def wrong(communicator: Communicator) -> list[str]:
    """The collectives that did not give on the GPU what the tree gives on the host."""
    failed = []
    size, rank = communicator.size, communicator.rank
    for dtype in DTYPES:
        for shape in SHAPES:
            tensors = [drawn("gpu", other, dtype, shape) for other in range(size)]
            own = tensors[rank].cuda()
            for attempt in range(2):
                total, copy = own.clone(), own.clone()
                communicator.all_reduce(ReduceOp.SUM, [total])
                communicator.broadcast(copy, size - 1)
                part = communicator.reduce_scatter(ReduceOp.SUM, [own])
                gathered = communicator.all_gather(own)
                expected = tree_reduce(ReduceOp.SUM, tensors)
                start, stop = expected.numel() * rank // size, expected.numel() * (rank + 1) // size
                pairs = {
                    "all_reduce": (total, expected),
                    "broadcast": (copy, tensors[-1]),
                    "reduce_scatter": (part, expected.flatten()[start:stop]),
                    "all_gather": (torch.stack(gathered), torch.stack(tensors)),
                }
                failed += [
                    f"{name} {dtype} {shape} {attempt}"
                    for name, (found, right) in pairs.items()
                    if not found.is_cuda or not torch.equal(found.cpu(), right)
                ]
    return failed


def through_the_host(store: Store, rank: int, size: int) -> list[list[str]]:
    gloo = NetworkCommunicator(PrefixStore("gloo", store), rank, size)
    failed = []
    for communicator in (StagedCommunicator(gloo), connect(PrefixStore("auto", store), rank, size)):
        with communicator:
            assert communicator.takes(torch.device("cuda"))
            failed.append(wrong(communicator))
            communicator.barrier()
    return failed


def test_gpu_tensors_through_host_memory_have_the_bits_of_the_tree() -> None:
    assert run_ranks(2, through_the_host, timeout=100) == [[[], []]] * 2


def test_nccl_carries_gpu_tensors_of_one_rank() -> None:
    with NcclCommunicator(IdentityCommunicator(), timeout_seconds=60) as communicator:
        assert wrong(communicator) == []
        mean = torch.tensor([3.0, 5.0], device="cuda")
        communicator.all_reduce(ReduceOp.MEAN, [mean], count=4)
        assert mean.tolist() == [0.75, 1.25]
        communicator.check_health()
        communicator.barrier()


def through_nccl(store: Store, rank: int, size: int) -> list[str]:
    # NCCL refuses ranks that share a GPU, unless each seems to be on its own host.
    os.environ["NCCL_HOSTID"] = f"host-{rank}"
    gloo = NetworkCommunicator(PrefixStore("gloo", store), rank, size)
    on_host = StagedCommunicator(gloo)
    with NcclCommunicator(on_host, timeout_seconds=60) as communicator:
        failed = [failure for failure in wrong(communicator) if "float" not in failure]
        # NCCL adds in its own order. For two numbers there is only one order.
        failed += [failure for failure in wrong(communicator) if size == 2 and "float32" in failure]
        mean = torch.full((3,), float(rank), device="cuda")
        communicator.all_reduce(ReduceOp.MEAN, [mean])
        assert mean.tolist() == [(size - 1) / 2] * 3
        communicator.barrier()
    return failed


@pytest.mark.parametrize("size", [2, 3])
def test_nccl_carries_gpu_tensors_between_processes(size: int) -> None:
    assert run_ranks(size, through_nccl, timeout=110) == [[]] * size


def chosen(store: Store, rank: int, size: int) -> list[str]:
    # NCCL refuses ranks that share a GPU, unless each seems to be on its own host.
    os.environ["NCCL_HOSTID"] = f"host-{rank}"
    names: list[str] = []
    for implementation, gpu in [("AUTO", f"gpu {rank}"), ("AUTO", "gpu"), ("TCP", f"gpu {rank}")]:
        with connect(
            PrefixStore(f"{implementation} {len(names)}", store),
            rank,
            size,
            timeout_seconds=60,
            implementation=CommunicationImplementation(implementation),
            gpus=[gpu],
        ) as communicator:
            total = torch.ones(3, device="cuda")
            communicator.all_reduce(ReduceOp.SUM, [total])
            assert total.tolist() == [size] * 3
            communicator.barrier()
            names.append(communicator.name.split(" ")[0])
    return names


def test_nccl_is_chosen_where_every_rank_has_gpus_of_its_own() -> None:
    assert run_ranks(2, chosen, timeout=110) == [["NCCL", "shared", "shared"]] * 2
