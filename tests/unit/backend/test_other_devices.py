from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore

import unisono  # noqa: F401
from unisono.errors import UnsupportedError

pytestmark = pytest.mark.backend
META = torch.device("meta")


@pytest.fixture(params=["unisono", "cpu:unisono,meta:mpi"])
def _group(request: pytest.FixtureRequest) -> Iterator[None]:
    distributed.init_process_group(request.param, store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("_group")
def test_a_device_that_no_backend_is_named_for_is_an_error() -> None:
    with pytest.raises(UnsupportedError, match="A tensor on meta was given") as raised:
        distributed.all_reduce(torch.empty(2, device=META))

    assert "cpu:unisono,cuda:nccl" in str(raised.value)


@pytest.mark.usefixtures("_group")
def test_torch_may_ask_whether_there_is_a_backend_for_gpus() -> None:
    group = distributed.group.WORLD
    assert group is not None

    # torch's own groups raise that, and torch expects it when it ends a group.
    with pytest.raises(RuntimeError, match="a process group that has 'nothing' for it"):
        group._get_backend(torch.device("cuda"))


def test_gpus_that_are_not_there_have_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    distributed.init_process_group("cpu:unisono,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    try:
        group = distributed.group.WORLD
        assert group is not None
        with pytest.raises(RuntimeError, match="a process group that has 'nccl' for it"):
            group._get_backend(torch.device("cuda"))
    finally:
        distributed.destroy_process_group()


def test_a_device_may_have_gloo() -> None:
    distributed.init_process_group("cpu:unisono,cuda:gloo", store=HashStore(), rank=0, world_size=1)
    try:
        group = distributed.group.WORLD
        assert group is not None
        assert group._get_backend(torch.device("cuda")).name() == "gloo"
        assert {device.type for device in group._device_types} == {"cpu", "cuda"}
    finally:
        distributed.destroy_process_group()


@pytest.mark.gpu
def test_tensors_of_a_gpu_go_through_nccl() -> None:
    distributed.init_process_group("cpu:unisono,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    try:
        for device in ("cuda", "cpu"):
            tensor = torch.ones(3, device=device)
            gathered = [torch.zeros(3, device=device)]
            for _ in range(2):
                distributed.all_reduce(tensor)
                distributed.all_gather(gathered, tensor)
            distributed.gather(tensor, [torch.zeros(3, device=device)], dst=0)
            assert gathered[0].tolist() == [1.0, 1.0, 1.0]
        distributed.barrier()
        distributed.barrier(device_ids=[0])
    finally:
        distributed.destroy_process_group()
