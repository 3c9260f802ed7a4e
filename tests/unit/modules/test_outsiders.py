"""What was made outside any scope is refused in a step, from the first run on."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from worker_threads import on_strategies

import unisono as uo
from unisono.errors import ContextError
from unisono.modules.outsiders import _owner_of
from unit.variables.made import replica_id

Make = Callable[..., uo.MirroredStrategy]

X = torch.ones(1, 2)

# A process in which no scope was ever entered; what it uses was made before unisono was imported.
FIRST_RUN = """
    import torch
    from torch import nn

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    import unisono as uo

    strategy = uo.MirroredStrategy(["cpu:0", "cpu:1"])
    found = []
    steps = {
        "model": lambda: model(torch.ones(1, 2)).sum().backward(),
        "optimizer": lambda: optimizer.step(),
        "scaler": lambda: scaler.scale(torch.ones(())),
        "scheduler": lambda: scheduler.step(),
    }
    for name, step in steps.items():
        try:
            strategy.run(step)
        except uo.errors.ContextError as error:
            assert "strategy.scope()" in str(error) and "strategy.mirror(" in str(error), error
            found.append(name)
    assert found == list(steps), found
    assert model.weight.grad is None
    strategy.close()
"""


def test_the_first_run_of_a_process_refuses_what_was_made_outside() -> None:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FIRST_RUN)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * weight.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, grad.sum().expand(2, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x)
        return output


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (Net, r"Net has parameters \('layer\.(weight|bias)', shape"),
        (lambda: nn.LayerNorm(2), "LayerNorm has parameters"),
        (lambda: nn.Sequential(nn.BatchNorm1d(2).eval()), "Sequential has parameters"),
        (lambda: Recurrent(), "(LSTM|Recurrent) has parameters"),
        (lambda: Custom(), "Custom has parameters"),
    ],
)
def test_a_model_that_is_only_called_and_back_propagated(
    mirrored: Make, make: Callable[[], nn.Module], named: str
) -> None:
    model, strategy = make(), mirrored()

    for _ in range(2):
        with pytest.raises(ContextError, match=named):
            strategy.run(lambda: model(X).sum().backward())
    assert all(p.grad is None for p in model.parameters())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x[None])[0]
        return output


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = Scaled.apply(x.clone().requires_grad_(), self.weight)  # type: ignore[no-untyped-call]
        return output


def test_a_model_that_is_used_in_a_later_run_of_the_same_step(mirrored: Make) -> None:
    strategy, outside = mirrored(), nn.Linear(2, 2)
    with strategy.scope():
        model = nn.Linear(2, 2)

    def step(both: bool) -> None:
        loss = model(X).sum()
        if both:
            loss = loss + outside(X).sum()
        loss.backward()

    strategy.run(step, args=(False,))
    with pytest.raises(ContextError, match="Linear has parameters"):
        strategy.run(step, args=(True,))
    assert outside.weight.grad is None


def test_a_model_that_is_unfrozen_after_the_first_run(mirrored: Make) -> None:
    strategy, outside = mirrored(), nn.Linear(2, 2).requires_grad_(False)
    with strategy.scope():
        model = nn.Linear(2, 2)

    def step() -> None:
        outside(model(X)).sum().backward()

    for _ in range(2):
        strategy.run(step)
    outside.requires_grad_()
    with pytest.raises(ContextError, match="Linear has parameters"):
        strategy.run(step)
    assert outside.weight.grad is None


def test_a_model_of_another_strategy_is_refused_in_a_step(mirrored: Make) -> None:
    with mirrored().scope():
        model = nn.Linear(2, 2)

    with pytest.raises(ContextError, match="Linear was made under another strategy"):
        mirrored().run(lambda: model(X).sum().backward())


def test_a_step_kept_from_before_the_run_says_what_to_write(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = optimizer.step

    with pytest.raises(ContextError, match="looked up before `run`"):
        strategy.run(lambda: kept())


def test_what_is_only_read_may_come_from_outside(mirrored: Make) -> None:
    strategy, outside = mirrored(), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    frozen = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False).eval()
    with strategy.scope():
        model = nn.Linear(2, 2)
    loss = nn.MSELoss()

    def step() -> int:
        with torch.no_grad():
            target = outside(X)
        loss(frozen(model(X)), target).backward()
        assert outside(X).grad_fn is not None
        return sum(p.numel() for p in outside.parameters())

    assert strategy.run(step) == 6
    assert model.weight.grad is not None


def test_what_a_replica_makes_is_its_own(mirrored: Make) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Linear(2, 2)

    def step() -> tuple[float, float]:
        made = nn.Sequential(nn.LazyLinear(2), nn.LSTM(2, 2))
        made[0](X)
        copied = nn.Parameter(model.weight.detach().clone())
        optimizer = torch.optim.SGD([*made.parameters(), copied], lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        before = copied.sum().item()
        for _ in range(2):
            optimizer.zero_grad()
            (made(X)[0].sum() + copied.sum()).backward()
            optimizer.step()
            scheduler.step()
        return before - copied.sum().item(), optimizer.param_groups[0]["lr"]

    for moved, rate in strategy.experimental_local_results(strategy.run(step)):
        assert moved == pytest.approx(4 * 1.5)
        assert rate == 0.25


def test_a_net_that_each_replica_keeps_is_its_own(mirrored: Make) -> None:
    strategy = mirrored()
    nets: dict[int, nn.Module] = {}

    def step() -> float:
        context = uo.get_replica_context()
        assert context is not None
        net = nets.setdefault(context.replica_id_in_sync_group, nn.Linear(2, 2, bias=False))
        net(X).sum().backward()
        return float(next(net.parameters()).grad.sum())  # type: ignore[union-attr]

    for expected in (4, 8):
        assert strategy.run(step).values == (expected, expected)


def test_statistics_that_replicas_would_share_are_refused(mirrored: Make) -> None:
    strategy = mirrored()
    teacher = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).requires_grad_(False)

    def step() -> None:
        teacher(torch.randn(4, 2))

    with pytest.raises(ContextError, match="running statistics"):
        strategy.run(step)
    teacher.eval()
    strategy.run(step)


def test_one_replica_on_each_of_many_workers(mirrored: Make) -> None:
    model = nn.Linear(2, 2)

    def on_worker(strategy: uo.Strategy) -> bool:
        with pytest.raises(ContextError, match="Linear has parameters"):
            strategy.run(lambda: model(X).sum().backward())
        return True

    assert on_strategies(2, on_worker) == [True, True]


def test_a_single_replica_uses_what_it_likes(mirrored: Make) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    mirrored(1).run(lambda: (model(X).sum().backward(), optimizer.step()))

    assert model.weight.grad is not None


def test_other_threads_build_tuples_while_the_model_of_a_parameter_is_sought() -> None:
    model, ended = nn.Linear(2, 2), threading.Event()

    def build() -> None:
        while not ended.is_set():
            assert len(tuple(number for number in range(20))) == 20

    with ThreadPoolExecutor(1) as pool:
        built = pool.submit(build)
        owners = [_owner_of(model.weight) for _ in range(5)]
        ended.set()
        built.result()

    assert all(owner is model for owner in owners)


@pytest.mark.parametrize("where", ["outside", "in the scope", "in the step"])
def test_modules_that_functional_call_puts_tensors_into(mirrored: Make, where: str) -> None:
    strategy = mirrored(2)
    module = nn.Linear(2, 1, bias=False).to("meta")
    if where == "in the scope":
        with strategy.scope():
            module = nn.Linear(2, 1, bias=False)

    def step() -> Tensor:
        called = copy.deepcopy(module) if where == "in the step" else module
        weight = torch.full((1, 2), 1.0 + replica_id())
        out: Tensor = functional_call(called, {"weight": weight}, (X,))
        return out

    if where == "outside":
        with pytest.raises(ContextError, match=r"functional_call.*Linear.*deepcopy"):
            strategy.run(step)
        return
    found = strategy.experimental_local_results(strategy.run(step))
    assert [one.item() for one in found] == [2.0, 4.0]


@pytest.mark.parametrize("use", ["module", "parameters", "clipping"])
def test_a_list_that_a_step_fills_with_the_copies_of_its_replica(mirrored: Make, use: str) -> None:
    strategy = mirrored()
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 1))
    kept: list[Any] = []

    def step() -> None:
        if not kept and replica_id() == 0:
            kept.extend(model if use == "module" else model.parameters())
        uo.once(lambda: None)
        uses: dict[str, Any] = {
            "module": lambda: kept[0](X),
            "parameters": lambda: functional.linear(X, *kept),
            "clipping": lambda: model(X),
        }
        uses[use]().sum().backward()
        if use == "clipping":
            nn.utils.clip_grad_norm_(kept, 0.1)

    with pytest.raises(ContextError, match=r"that another replica has\. .* before `run`"):
        strategy.run(step)

    # What it says works.
    model.zero_grad()
    kept[:] = model if use == "module" else model.parameters()
    strategy.run(step)
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(0.1 if use == "clipping" else 3**0.5, rel=1e-4)
