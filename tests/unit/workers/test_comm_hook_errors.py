"""Communication hooks that fail, and what is refused as one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from worker_threads import on_strategies

import unisono as uo
from unisono.errors import ContextError, UnsupportedError


@pytest.mark.parametrize("num_workers", [1, 2])
def test_after_an_error_in_a_hook_training_goes_on(num_workers: int) -> None:
    def fail_once(strategy: uo.Strategy) -> tuple[list[str], Any]:
        calls = []

        def hook(group: Any, bucket: Any) -> Any:
            calls.append(bucket.index())
            if len(calls) == 2:
                raise ArithmeticError("not today")
            return default_hooks.allreduce_hook(group, bucket)

        strategy.register_comm_hook(None, hook)
        with strategy.scope():
            model = nn.ParameterList([nn.Parameter(torch.ones(size)) for size in (4, 3, 2, 1)])

        def step() -> None:
            sum((i + 1) * p.sum() for i, p in enumerate(model)).backward()

        with pytest.raises(ArithmeticError, match="not today") as caught:
            strategy.run(step)
        model.zero_grad()
        strategy.run(step)
        # What stands behind the pack that failed was not sent.
        assert calls == [0, 1, 0, 1, 2, 3]
        grads = [p.grad.tolist() for p in model if p.grad is not None]
        return getattr(caught.value, "__notes__", []), grads

    options = uo.experimental.CommunicationOptions(bytes_per_pack=1)
    for rank, (notes, grads) in enumerate(
        on_strategies(num_workers, fail_once, num_replicas=2, options=options)
    ):
        assert grads == [[1.0] * 4, [2.0] * 3, [3.0] * 2, [4.0]]
        if hasattr(BaseException, "add_note"):
            text = " ".join(notes)
            assert f"hook 'hook' on worker {rank} of {num_workers}, for bucket 1" in text
            assert "of shape (2,)" in text
            where = f" of worker {rank}" if num_workers > 1 else ""
            assert f"Raised on replica {2 * rank}{where} (cpu:0)" in text


@pytest.mark.parametrize(
    ("result", "found"), [(None, "a NoneType"), (torch.ones(7), r"a tensor of shape \(7,\)")]
)
def test_a_hook_must_return_the_gradients(
    mirrored: Callable[..., uo.MirroredStrategy], result: Any, found: str
) -> None:
    strategy = mirrored(2)
    strategy.register_comm_hook(None, lambda state, bucket: result)
    with strategy.scope():
        model = nn.Linear(4, 1)

    with pytest.raises(UnsupportedError, match=rf"returned {found}"):
        strategy.run(lambda: model(torch.ones(4)).sum().backward())


def test_a_hook_comes_first_and_alone(mirrored: Callable[..., uo.MirroredStrategy]) -> None:
    late, twice = mirrored(2), mirrored(2)
    with late.scope():
        nn.Linear(1, 1)
    twice.register_comm_hook(None, default_hooks.allreduce_hook)

    with pytest.raises(ContextError, match="was made in the scope"):
        late.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(ContextError, match="already has a communication hook"):
        twice.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(UnsupportedError, match="cannot be copied"):
        copy.deepcopy(twice)


def test_what_cannot_be_a_hook_is_refused(mirrored: Callable[..., uo.MirroredStrategy]) -> None:
    strategy = mirrored(2)
    state = powerSGD_hook.PowerSGDState(process_group=None, start_powerSGD_iter=2)

    with pytest.raises(UnsupportedError, match=r"a function of a state and a bucket, got 5"):
        strategy.register_comm_hook(None, 5)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"Pass `strategy\.process_group`"):
        strategy.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    with pytest.raises(UnsupportedError, match=r"`reduce_gradients` is ReduceOp\.MAX"):
        mirrored(2, reduce_gradients=uo.ReduceOp.MAX).register_comm_hook(None, print)
    with pytest.raises(ContextError, match="takes no communication hook"):
        uo.get_strategy().register_comm_hook(None, default_hooks.allreduce_hook)
    assert not distributed.is_initialized()
