"""What the workers of a strategy exchange besides reductions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.communicators import Communicator
from unisono.errors import ReplicaMismatchError, UnsupportedError
from unisono.kernels import check_gather
from unisono.reductions.layouts import ReplicaLayout
from unisono.reductions.wire import num_bytes, read, write
from unisono.values import is_sparse

# Small and rare, so it goes through host memory, which every communicator supports.
_HOST = torch.device("cpu")


class Workers:
    """All workers of the job, including this one."""

    def __init__(self, communicator: Communicator, counts: Sequence[int] | None = None) -> None:
        self.change(communicator, counts)

    def change(self, communicator: Communicator, counts: Sequence[int] | None = None) -> None:
        """Makes these the workers that there are from now on."""
        self.communicator = communicator
        self._counts = None if counts is None else tuple(counts)
        self._layouts: dict[int, ReplicaLayout] = {}

    def layout(self, num_local: int) -> ReplicaLayout:
        """Returns which worker has which replicas, where this worker has `num_local`."""
        if num_local not in self._layouts:
            rank, size = self.communicator.rank, self.communicator.size
            if self._counts is not None and len(set(self._counts)) > 1:
                if num_local != self._counts[rank]:
                    raise ReplicaMismatchError(
                        f"A value has {num_local} components on worker {rank}, which has "
                        f"{self._counts[rank]} of the {sum(self._counts)} replicas. Give one "
                        "component per replica."
                    )
                self._layouts[num_local] = ReplicaLayout(self._counts, rank)
            else:
                self._layouts[num_local] = ReplicaLayout((num_local,) * size, rank)
        return self._layouts[num_local]

    @property
    def are_many(self) -> bool:
        """Whether there is another worker."""
        return self.communicator.size > 1

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Overwrites the tensors of all workers with those of the chief."""
        if not self.are_many:
            return
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for group in by_kind.values():
            pack = torch.cat([tensor.detach().reshape(-1) for tensor in group]).to(_HOST)
            self.communicator.broadcast(pack)
            sizes = [tensor.numel() for tensor in group]
            for tensor, part in zip(group, pack.split(sizes), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))

    def of_chief(self, tensor: Tensor) -> Tensor:
        """Returns the chief's value of `tensor`."""
        if not self.are_many:
            return tensor
        if is_sparse(tensor):
            indices = self.communicator.all_gather(tensor._indices().to(_HOST))[0]
            values = self.communicator.all_gather(tensor._values().to(_HOST))[0]
            return torch.sparse_coo_tensor(
                indices, values, tensor.shape, device=tensor.device, check_invariants=False
            )
        copy = tensor.detach().clone()
        self.share([copy])
        return copy

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the tensors of all workers, on the device of this worker's. Shapes may differ."""
        if not self.are_many:
            return [tensor]
        gathered = self.communicator.all_gather(tensor.detach().to(_HOST))
        return [one.to(tensor.device) for one in gathered]

    def concatenate(self, tensors: Sequence[Tensor], axis: int) -> tuple[Tensor, int]:
        """Concatenates the tensors of all replicas, and returns where this worker's begin."""
        check_gather(tensors, axis, self.layout(len(tensors)).own.start)
        place = tensors[0].device
        here = torch.cat([tensor.detach().to(place) for tensor in tensors], dim=axis)
        gathered = self.gather(here)
        check_gather(gathered, axis, holder="worker")
        first = sum(other.shape[axis] for other in gathered[: self.communicator.rank])
        return (torch.cat(gathered, dim=axis) if len(gathered) > 1 else here), first

    def gather_objects(self, thing: Any) -> list[Any]:
        """Returns the objects of all workers, which `wire` must support. Tensors are on the host.

        A single worker gets its own object.
        """
        if not self.are_many:
            return [thing]
        refusal = ""
        try:
            text, data = write(thing)
        except UnsupportedError as error:
            refusal, (text, data) = str(error), write(None)
        own = torch.frombuffer(bytearray(json.dumps([refusal, text]).encode()), dtype=torch.uint8)
        told = [json.loads(one.numpy().tobytes()) for one in self.gather(own)]
        for rank, (refused, _) in enumerate(told):
            if refused:
                raise UnsupportedError(f"Worker {rank} cannot go on. {refused}")
        texts = [text for _, text in told]
        has_tensors = any(map(num_bytes, texts))
        gathered = self.gather(data) if has_tensors else [data] * len(texts)
        return [read(text, data) for text, data in zip(texts, gathered, strict=True)]
