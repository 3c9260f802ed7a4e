"""Backends for what Unisono does not carry itself, in a group that it makes.

torch takes a process group that is written in Python for all devices, and makes no other backend:
of "cpu:unisono,cuda:nccl" it heeds the first part alone. So the second part is heeded here.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import BackendConfig

from unisono.communicators.gloo import make_gloo_group
from unisono.errors import UnsupportedError


def make_backend(
    group: distributed.ProcessGroup,
    device: torch.device,
    store: Store,
    timeout: timedelta,
    check_health: Callable[[float], None] = lambda _: None,
) -> tuple[distributed.ProcessGroup.BackendType, Any]:
    """Makes what carries tensors on `device`, other than Unisono. Every rank does at one time."""
    name = _name_for(group, device)
    own = PrefixStore(f"{device.type}/{name}", store)
    if name == "gloo":
        return distributed.ProcessGroup.BackendType.GLOO, _gloo(group, own, timeout, check_health)
    if name == "nccl" and distributed.is_nccl_available():
        return distributed.ProcessGroup.BackendType.NCCL, _nccl(group, own, timeout)
    raise UnsupportedError(
        f"A tensor on {device.type} was given to a process group that has {name or 'nothing'!r} "
        "for it. Name a backend for that device too, for example "
        '`init_process_group("cpu:unisono,cuda:nccl")`.'
    )


def _name_for(group: distributed.ProcessGroup, device: torch.device) -> str | None:
    if device.type == "cpu":
        return "gloo"
    try:
        config = distributed.get_backend_config(group)
    except ValueError:
        # `init_process_group(device_id=...)` asks before the group has a name.
        return distributed.Backend.default_device_backend_map.get(device.type)
    named = BackendConfig(distributed.Backend(config)).get_device_backend_map()
    return named.get(device.type)


def _gloo(
    group: distributed.ProcessGroup,
    store: Store,
    timeout: timedelta,
    check_health: Callable[[float], None],
) -> Any:
    return make_gloo_group(
        store,
        group.rank(),
        group.size(),
        timeout_seconds=timeout.total_seconds(),
        # Enough for what is left to Gloo: sends and receives need none.
        num_threads=1,
        check_health=check_health,
    )


def _nccl(group: distributed.ProcessGroup, store: Store, timeout: timedelta) -> Any:
    make: Any = distributed.ProcessGroupNCCL
    options = make.Options()
    options._timeout = timeout
    return make(store, group.rank(), group.size(), options)
