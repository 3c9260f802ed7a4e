"""Communication hooks of logical replicas: a call per replica, and equal bits at all layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from on_replica import replica as context
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from worker_threads import on_strategies, one_at_a_time

import unisono as uo
from unisono.errors import UnisonoError, UnsupportedError
from unisono.reductions import dealt
from unisono.workers.replica_hooks import ReplicaHooks
from unit.workers.test_logical_replicas import Chain


@dataclass
class Carried:
    """Keeps what a hook has left out."""

    group: Any
    rest: dict[int, Tensor]
    num_calls: int = 0


def largest_only(state: Carried, bucket: uo.hooks.GradBucket) -> Tensor:
    """Sends the larger half of the gradients, and the others in a later step."""
    full = bucket.buffer() + state.rest.get(bucket.index(), 0.0)
    sent = full.where(full.abs() > full.abs().median(), 0.0)
    state.rest[bucket.index()] = full - sent
    state.num_calls += 1
    parts = [torch.empty_like(sent) for _ in range(state.group.size())]
    distributed.all_gather(parts, sent, state.group)
    assert torch.equal(parts[state.group.rank()], sent)
    return torch.stack(parts).mean(0)


Hook = Callable[[uo.Strategy], tuple[Any, Any]]
HOOKS: dict[str, Hook] = {
    "compress": lambda _: (None, uo.hooks.Compress(torch.float16)),
    "compress with feedback": lambda _: (None, uo.hooks.Compress(error_feedback=True)),
    "torch bf16": lambda _: (None, default_hooks.bf16_compress_hook),
    "torch wrapper": lambda _: (
        None,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    ),
    "torch PowerSGD": lambda strategy: (
        powerSGD_hook.PowerSGDState(
            strategy.process_group, start_powerSGD_iter=2, min_compression_rate=1
        ),
        powerSGD_hook.powerSGD_hook,
    ),
    "own": lambda strategy: (Carried(strategy.process_group, {}), largest_only),
}


@pytest.mark.parametrize("make", HOOKS.values(), ids=HOOKS)
def test_hooks_have_the_same_bits_at_every_layout(
    make: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.random, "fork_rng", one_at_a_time(torch.random.fork_rng))

    def program(strategy: uo.Strategy) -> Tensor:
        strategy.register_comm_hook(*make(strategy))
        with strategy.scope():
            model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))
            for i, parameter in enumerate(model.parameters()):
                nn.init.uniform_(parameter, -1, 1, torch.Generator().manual_seed(i))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

        def step() -> None:
            own = torch.Generator().manual_seed(context().replica_id_in_sync_group)
            optimizer.zero_grad()
            model(torch.randn(3, 6, generator=own)).square().sum().backward()
            optimizer.step()

        for _ in range(4):
            strategy.run(step)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    options = uo.experimental.CommunicationOptions(bytes_per_pack=100)
    found = [
        one
        for num_workers in (1, 2, 3)
        for one in on_strategies(
            num_workers,
            program,
            num_replicas=dealt(4, num_workers),
            threads_per_replica=1,
            options=options,
        )
    ]

    assert all(torch.equal(one, found[0]) for one in found)


def not_reduced(group: Any, bucket: uo.hooks.GradBucket) -> Tensor:
    return bucket.buffer()


def with_a_branch(group: Any, bucket: uo.hooks.GradBucket) -> Tensor:
    if group.rank() == 0:
        distributed.barrier(group)
    return bucket.buffer()


@pytest.mark.parametrize(
    ("hook", "words"), [(not_reduced, "different gradients"), (with_a_branch, "same calls")]
)
def test_a_hook_must_do_the_same_for_all_replicas(hook: Any, words: str) -> None:
    def program(strategy: uo.Strategy) -> None:
        strategy.register_comm_hook(None, hook)
        with strategy.scope():
            model = nn.Linear(1, 1)
        with pytest.raises(UnisonoError, match=words):
            strategy.run(
                lambda: (model(torch.ones(1)).sum() * context().replica_id_in_sync_group).backward()
            )
        # An error that is kept would keep the frames that it has passed, and their memory.
        hooks = strategy.extended.hook
        assert isinstance(hooks, ReplicaHooks)
        assert [rank.failure for rank in hooks._ranks] == [None, None]

    on_strategies(1, program, num_replicas=2, threads_per_replica=1)


def test_a_reduction_of_replicas_leaves_none_for_a_hook() -> None:
    def program(strategy: uo.Strategy) -> None:
        with pytest.raises(UnsupportedError, match=r"Chain combines the replicas.*num_replicas"):
            strategy.register_comm_hook(None, uo.hooks.Compress())

    on_strategies(1, program, num_replicas=2, threads_per_replica=1, make_ops=Chain)
