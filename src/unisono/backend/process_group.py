"""A process group of torch.distributed in which Unisono carries the tensors of the CPU.

Gloo does what `CommunicatorGroup` passes on, sends and receives. It also raises for wrong
arguments. Tensors of other devices go to the backend that the program names for them.

torch takes a process group that is written in Python for all devices, and makes no other backend:
of "cpu:unisono,cuda:nccl" it heeds the first part alone. So the second part is heeded here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import (
    BarrierOptions,
    DebugLevel,
    PrefixStore,
    Store,
    Work,
    get_debug_level,
)
from torch.distributed.distributed_c10d import BackendConfig

from unisono.backend.engine import Engine
from unisono.communicators import Communicator
from unisono.communicators.communicator import gather_texts
from unisono.communicators.gloo import make_gloo_group
from unisono.errors import UnequalCollectivesError, UnsupportedError
from unisono.groups import CommunicatorGroup, Movement, tensors_in


def fits_torch() -> bool:
    """Whether torch can use process groups that are written in Python.

    torch 2.6 forgets the Python objects that they return, and C++ then waits for them forever.
    """
    return hasattr(distributed.ProcessGroup, "shutdown")


class NoBackendError(UnsupportedError, RuntimeError):
    """A device that a group has no backend for.

    torch asks every group for its backend for GPUs, for example when it ends the group, and takes
    a RuntimeError for the answer that there is none.
    """


class UnisonoProcessGroup(CommunicatorGroup):
    """The process group that `init_process_group("unisono")` creates, on all ranks at once.

    Args:
        store: Where the ranks meet.
        rank: Which rank this is.
        size: How many there are.
        timeout: How long to wait for other ranks, now and in each collective.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        if not fits_torch():
            raise UnsupportedError(
                'The backend "unisono" needs torch 2.7 or newer, and this is torch '
                f'{torch.__version__}. Install a newer one, or use the backend "gloo".'
            )
        super().__init__(rank, size)
        # A launcher keeps its store when a program ends its group and makes another.
        visit = store.add(f"visits of rank {rank}", 1)
        self._store = PrefixStore(f"visit {visit}", store)
        self._timeout = timeout
        self._others = distributed.ProcessGroup(self._store, rank, size)
        self._is_detailed = get_debug_level() == DebugLevel.DETAIL
        self._is_lent = False
        self._num_passed_on = 0
        cpu = torch.device("cpu")
        self._engine = Engine(
            PrefixStore("engine", self._store),
            rank,
            size,
            timeout,
            lambda check_health: self._backend_for(cpu, check_health),
        )
        try:
            # Not when it is first needed: two ranks that send and receive would need the others.
            self._gloo = self._backend_for(cpu)
            self._gloo_timeout = self._gloo.options._timeout
        except BaseException:
            self._engine.close()
            raise

    def getBackendName(self) -> str:
        """The name that torch shows."""
        return "unisono"

    def shutdown(self) -> None:
        """Ends the group when everything that was begun has ended. May be called twice."""
        self._engine.close()
        super().shutdown()

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: list[torch.device] | None = None,
    ) -> UnisonoProcessGroup | None:
        """Returns a group of some ranks of this one, or None on the others."""
        ranks = sorted(new_ranks)
        if self.rank() not in ranks:
            return None
        name = group_name or f"{self.group_name}:split:{'_'.join(map(str, ranks))}"
        store, rank = PrefixStore(f"{name}/", self._store), ranks.index(self.rank())
        group = UnisonoProcessGroup(store, rank, len(ranks), timeout or self._timeout)
        group._set_group_name(name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split")
        return group

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives were begun, here and by the other backends."""
        return self._engine.num_begun + self._num_passed_on

    def get_group_store(self) -> Store:
        """Where the ranks of this group meet."""
        return self._store

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Work:
        """Lets another backend send."""
        return self._message("send", tensors, dstRank, tag)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Work:
        """Lets another backend receive."""
        return self._message("recv", tensors, srcRank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Lets another backend receive."""
        return self._message("recv_anysource", tensors, tag)

    def _carries(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def _begin(self, call: Movement, outputs: list[Tensor], name: str, opts: Any) -> Work:
        if self._is_lent:
            self._follow_gloo()
        return self._engine.begin(call, outputs, name, opts)

    def _message(self, name: str, tensors: list[Tensor], *args: int) -> Work:
        if len(args) == 2 and not 0 <= args[0] < self.size():
            # Gloo would end the process.
            raise UnsupportedError(
                f"`{name}` needs a rank from 0 to {self.size() - 1}, got {args[0]}."
            )
        self._backend_for(tensors[0].device)
        self._num_passed_on += 1
        work: Work = getattr(self._others, name)(tensors, *args)
        return work

    def _pass_on(self, name: str, *args: Any, **options: Any) -> Work:
        tensors = list(tensors_in([*args, *options.values()]))
        where = tensors[0] if tensors else args[-1] if args else None
        device = getattr(where, "device", None) or torch.device("cpu")
        self._backend_for(device)
        if self._is_detailed and device.type == "cpu":
            self._begin(
                lambda communicator: check_same_call(communicator, name, tensors, args[-1]),
                [],
                name,
                BarrierOptions(),
            ).wait()
        self._num_passed_on += 1
        work: Work = getattr(self._others, name)(*args, **options)
        return work

    def _get_backend(self, device: torch.device) -> Any:
        """Returns the backend for tensors on `device` that are not carried here.

        `_set_pg_timeout` sets the timeout of that backend, so ours follows it.
        """
        self._is_lent = True
        return self._backend_for(device)

    def _follow_gloo(self) -> None:
        self._is_lent = False
        timeout = self._gloo.options._timeout
        if timeout != self._gloo_timeout:
            self._gloo_timeout = self._engine.timeout = timeout

    def _backend_for(
        self, device: torch.device, check_health: Callable[[float], None] = lambda _: None
    ) -> Any:
        """Returns the backend for tensors on `device` that are not carried here."""
        if device.type not in [known.type for known in self._others._device_types]:
            kind, backend = make_backend(self, device, self._store, self._timeout, check_health)
            for group in (self, self._others):
                group._register_backend(device, kind, backend)
                group._set_default_backend(kind)
        return self._others._get_backend(device)


def check_same_call(
    communicator: Communicator, name: str, tensors: Sequence[Tensor], opts: Any
) -> None:
    """Raises unless all ranks make the same call with tensors of the same shapes and dtypes.

    `TORCH_DISTRIBUTED_DEBUG=DETAIL` asks for it. Unisono compares its own collectives always. torch
    wraps Gloo to compare calls that go there, but not a group written in Python.
    """
    # Ranks may give each other unequal parts in these.
    has_one_shape = not name.startswith("alltoall")
    kinds = {
        f"{str(one.dtype).removeprefix('torch.')}{list(one.shape) if has_one_shape else ''}"
        for one in tensors
    }
    root = getattr(opts, "rootRank", None)
    own = f"{name}{'' if root is None else f' with root {root}'} of {', '.join(sorted(kinds))}"
    calls = gather_texts(communicator, own)
    if odd := [rank for rank, call in enumerate(calls) if call != calls[0]]:
        made = "; ".join(f"rank {rank} makes {call}" for rank, call in enumerate(calls))
        raise UnequalCollectivesError(
            f"The ranks call different collectives: {made}. Call the same collectives in the same "
            "order on every rank of the group.",
            odd,
        )


def make_backend(
    group: distributed.ProcessGroup,
    device: torch.device,
    store: Store,
    timeout: timedelta,
    check_health: Callable[[float], None] = lambda _: None,
) -> tuple[distributed.ProcessGroup.BackendType, Any]:
    """Makes what carries tensors on `device`, other than Unisono. Every rank does at one time."""
    name = _name_for(group, device)
    place = PrefixStore(f"{device.type}/{name}", store), group.rank(), group.size()
    if name == "gloo":
        seconds = timeout.total_seconds()
        made = make_gloo_group(*place, timeout_seconds=seconds, check_health=check_health)
        return distributed.ProcessGroup.BackendType.GLOO, made
    if name == "nccl" and distributed.is_nccl_available() and torch.cuda.is_available():
        nccl: Any = distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        return distributed.ProcessGroup.BackendType.NCCL, nccl(*place, options)
    raise NoBackendError(
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
