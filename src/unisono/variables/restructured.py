"""Buffers that replicas have registered, removed or given another shape in a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unisono.errors import ReplicaMismatchError
from unisono.reductions import Workers
from unisono.variables.statistics import chosen_of, mean_of

_ABSENT = "none"
_PERSISTENCE = "_non_persistent_buffers_set"


class Restructured(NamedTuple):
    """What is to be done to the primaries, so that they have what their replicas have."""

    modules: Sequence[nn.Module | None]
    primaries: Sequence[dict[str, Tensor | None]]
    attributes: Sequence[Sequence[dict[str, Any]]]
    keys: Sequence[tuple[int, str]]

    def settle(self, weights: Sequence[float], workers: Workers) -> None:
        """Changes the primaries."""
        self._check(workers)
        for module, name in self.keys:
            buffers = [own[module]["_buffers"] for own in self.attributes]
            primary = self.primaries[module]
            if name not in buffers[0]:
                primary.pop(name, None)
                continue
            parts = [own[name] for own in buffers]
            if parts[0] is None:
                primary[name] = None
            elif parts[0].is_floating_point() and parts[0].layout is torch.strided:
                primary[name] = mean_of([part.detach() for part in parts], weights, workers)
            else:
                primary[name] = chosen_of([part.detach().clone() for part in parts], workers)
            self._set_persistence(module, name)

    def _set_persistence(self, module: int, name: str) -> None:
        target = self.modules[module]
        if target is not None:
            own: set[str] = object.__getattribute__(target, "__dict__")[_PERSISTENCE]
            is_kept = name not in self.attributes[0][module][_PERSISTENCE]
            (own.discard if is_kept else own.add)(name)

    def _check(self, workers: Workers) -> None:
        """Raises unless all replicas of all workers have the same buffers."""
        found = [[*key, *self._kinds(*key)] for key in self.keys]
        data = torch.tensor(list(json.dumps(found).encode()), dtype=torch.uint8)
        everybody = [json.loads(bytes(one.tolist())) for one in workers.gather(data)]
        for entries in zip(*everybody, strict=False):
            kinds = [kind for entry in entries for kind in entry[2:]]
            keys = {tuple(entry[:2]) for entry in entries}
            if len(keys) > 1 or len(set(kinds)) > 1:
                raise _mismatch(self._name_of(*entries[0][:2]), kinds)
        if len({len(one) for one in everybody}) > 1:
            raise _mismatch("Some", [f"{len(one)} of another kind" for one in everybody])

    def _kinds(self, module: int, name: str) -> list[str]:
        return [_kind(own[module]["_buffers"].get(name)) for own in self.attributes]

    def _name_of(self, module: int, name: str) -> str:
        return f"{type(self.modules[module]).__name__}.{name}"


def _kind(buffer: Tensor | None) -> str:
    if buffer is None:
        return _ABSENT
    return f"{str(buffer.dtype).removeprefix('torch.')} of shape {tuple(buffer.shape)}"


def _mismatch(what: str, kinds: Sequence[str]) -> ReplicaMismatchError:
    found = ", ".join(f"{kind} on replica {i}" for i, kind in enumerate(kinds))
    return ReplicaMismatchError(
        f"The step set the buffer {what} to different values on the replicas: {found}. All "
        "replicas share a buffer after `run`. Keep the state of one replica, such as a cache, in a "
        "plain attribute: `self.cache = ...` without `register_buffer`."
    )
