"""What an elastic job is made of, in one process: other replicas, runs undone, known results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unisono as uo
from unisono.errors import UnsupportedError
from unisono.modules.snapshot import Snapshot
from unisono.values import PerReplica
from unisono.workers.elastic.results import packed, unpacked
from unit.workers.lone_worker import relayout, strategy_of


class Sum(nn.Module):
    """Adds to a buffer that is no statistic."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().sum()
        return x


class Program:
    """A program whose step uses most of what a step can use."""

    def __init__(self, strategy: uo.Strategy, *, clears: bool = True) -> None:
        self.strategy, self.clears = strategy, clears
        self.seen: list[float] = []
        with strategy.scope():
            torch.manual_seed(3)
            self.model = nn.Sequential(
                nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), Sum(), nn.Linear(8, 2)
            )
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.handle = self.weight.register_post_accumulate_grad_hook(
            lambda p: self.seen.append(_first(p.grad))
        )
        self.generator = torch.Generator().manual_seed(8)

    @property
    def weight(self) -> nn.Parameter:
        weight = self.model[0].weight
        assert isinstance(weight, nn.Parameter)
        return weight

    def step(self, x: Tensor) -> Tensor:
        if self.clears:
            self.optimizer.zero_grad()
        noise = torch.rand(x.shape, generator=self.generator)
        loss: Tensor = self.model(x + noise).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    def run(self) -> Tensor:
        numbers = torch.arange(48.0).view(8, 6) / 48
        (batch,) = self.strategy.experimental_distribute_dataset([numbers])
        mean: Tensor = self.strategy.reduce("MEAN", self.strategy.run(self.step, args=(batch,)))
        return mean

    def state(self) -> dict[str, Any]:
        tensors = {**self.model.state_dict(), "random": torch.get_rng_state()}
        for i, state in enumerate(self.optimizer.state.values()):
            tensors |= {f"{name} {i}": value for name, value in state.items()}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                tensors[f"gradient of {name}"] = parameter.grad
        bits: dict[str, Any] = {name: one.numpy().tobytes() for name, one in tensors.items()}
        bits["generator"] = self.generator.get_state().numpy().tobytes()
        bits["settings"] = [group["lr"] for group in self.optimizer.param_groups]
        return bits | {"scheduler": self.scheduler.state_dict(), "hooks": list(self.seen)}


def _first(grad: Tensor | None) -> float:
    assert grad is not None
    return grad.view(-1)[0].item()


@pytest.mark.parametrize("clears", [True, False])
def test_new_replicas_go_on_with_the_bits_of_the_old_ones(clears: bool) -> None:
    found = []
    for is_changed in (False, True):
        with strategy_of(4) as strategy:
            program = Program(strategy, clears=clears)
            losses = []
            for i in range(4):
                if is_changed and i > 0:
                    if i == 2:
                        relayout(strategy, 2)
                    relayout(strategy, 4)
                losses.append(program.run())
            found.append(program.state() | {"losses": torch.stack(losses).tolist()})

    assert found[0] == found[1]


def test_replicas_with_gradients_of_their_own_cannot_be_replaced() -> None:
    with strategy_of(2) as strategy:
        program = Program(strategy)
        program.handle.remove()

        def step() -> None:
            with strategy.no_sync():
                program.model(torch.rand(4, 6)).sum().backward()

        strategy.run(step)

        with pytest.raises(UnsupportedError, match="not reduced"):
            relayout(strategy, 3)


class Holder(nn.Module):
    """Has attributes of all kinds, and changes one of them in each call."""

    def __init__(self, change: Callable[[Any], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.count = 0
        self.held = [self.layer, {"names": ["a"]}, (1, {2})]
        self.table = torch.zeros(2)
        self.change = change

    def forward(self, inputs: Tensor) -> Tensor:
        self.change(self)
        outputs: Tensor = self.layer(inputs)
        return outputs


OWN: dict[str, Callable[[Any], object]] = {
    "a number": lambda one: setattr(one, "count", one.count + 1),
    "a new attribute": lambda one: setattr(one, "seen", True),
    "a tensor": lambda one: setattr(one, "table", torch.ones(2)),
    "a list": lambda one: one.held.append(3),
    "a list in a dict": lambda one: one.held[1]["names"].append("b"),
    "a set in a tuple": lambda one: one.held[2][1].add(3),
    "a deletion": lambda one: delattr(one, "count") if hasattr(one, "count") else None,
}


@pytest.mark.parametrize("change", OWN.values(), ids=OWN)
def test_replicas_with_attributes_of_their_own_cannot_be_replaced(
    change: Callable[[Any], object],
) -> None:
    with strategy_of(2) as strategy:
        with strategy.scope():
            model = Holder(change)
        strategy.run(lambda: model(torch.rand(4, 6)).sum().backward())

        with pytest.raises(UnsupportedError, match="has changed the attribute"):
            relayout(strategy, 3)


SHARED: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "nothing": (lambda: Holder(lambda one: None), 0),
    "a tensor with a graph": (
        lambda: Holder(lambda one: setattr(one, "kept", one.layer.weight * 2)),
        0,
    ),
    "a recurrent layer": (lambda: nn.LSTM(6, 3), 1),
    "a normalized weight": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), 0),
}


@pytest.mark.parametrize(("make", "is_tuple"), SHARED.values(), ids=SHARED)
def test_replicas_that_have_what_all_have_can_be_replaced(
    make: Callable[[], nn.Module], is_tuple: bool
) -> None:
    with strategy_of(2) as strategy:
        with strategy.scope():
            model = make()

        def step() -> Tensor:
            outputs = model(torch.ones(4, 6))
            loss: Tensor = (outputs[0] if is_tuple else outputs).sum()
            loss.backward()
            return loss.detach()

        before = strategy.run(step)
        # What the program changes itself reaches the replicas that come, too.
        model.eval()
        relayout(strategy, 3)
        after = strategy.run(step)

    assert after.values[0].tolist() == before.values[0].tolist()


@pytest.mark.parametrize("num_runs_before", [0, 2])
@pytest.mark.parametrize("clears", [True, False])
def test_a_run_that_is_undone_leaves_no_trace_but_what_python_did(
    clears: bool, num_runs_before: int
) -> None:
    with strategy_of(3) as strategy:
        program = Program(strategy, clears=clears)
        snapshot = Snapshot(strategy.extended.mirrors)
        for _ in range(num_runs_before):
            program.run()
        before = program.state()

        def again() -> dict[str, Any]:
            program.seen = before["hooks"][:]
            program.run()
            return program.state()

        snapshot.begin(keep_gradients=True)
        first = again()
        assert first["0.weight"] != before["0.weight"]
        for _ in range(2):
            snapshot.restore()
            strategy._worker._undo_drawing()
            relayout(strategy, 3)
            after = program.state() | {"hooks": before["hooks"]}
            assert [name for name in before if before[name] != after[name]] == []
            assert after.keys() == before.keys()
            assert again() == first
        snapshot.end()


def test_the_loss_scale_is_undone_too() -> None:
    with strategy_of(2) as strategy:
        program = Program(strategy)
        with strategy.scope():
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)

        def step() -> None:
            program.optimizer.zero_grad()
            scaler.scale(program.model(torch.ones(4, 6)).mean()).backward()
            scaler.step(program.optimizer)
            scaler.update()

        strategy.run(step)
        before = scaler.state_dict()
        snapshot = Snapshot(strategy.extended.mirrors)
        snapshot.begin(keep_gradients=True)
        strategy.run(step)
        assert scaler.get_scale() == 2 * before["scale"]

        snapshot.restore()

        assert scaler.state_dict() == before


def test_an_elastic_job_of_one_process_has_the_bits_of_one_that_is_not_elastic() -> None:
    found = []
    for elastic in (False, True):
        with strategy_of(3, elastic=elastic) as strategy:
            program = Program(strategy)
            losses = [program.run().item() for _ in range(3)]
            assert strategy.is_chief
            found.append(program.state() | {"losses": losses})

    assert found[0] == found[1]


def test_what_all_know_of_results_is_reduced_and_gathered_as_other_values_are() -> None:
    (batch,) = [torch.arange(8.0).view(4, 2)]

    def step(x: Tensor) -> tuple[Tensor, Tensor, int]:
        return x.sum(), x, len(x)

    found = []
    for elastic in (False, True):
        with strategy_of(3, elastic=elastic) as strategy:
            (given,) = strategy.experimental_distribute_dataset([batch])
            total, rows, count = strategy.run(step, args=(given,))
            assert (total.known_everywhere is not None) == elastic
            found.append(
                [
                    strategy.reduce("MEAN", total).item(),
                    strategy.reduce("MAX", total).item(),
                    strategy.gather(rows, axis=0).tolist(),
                    float(strategy.reduce("SUM", count)),
                ]
            )

    assert found[0] == found[1]


def test_small_results_arrive_with_their_bits() -> None:
    values = [
        PerReplica((torch.tensor(1.5), torch.tensor(float("nan")))),
        PerReplica(
            (torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(0, 3, dtype=torch.bfloat16))
        ),
        PerReplica((3, True)),
        PerReplica((torch.zeros(5000), torch.zeros(5000))),
        PerReplica(("text", "text")),
    ]
    variables = {3: [torch.zeros(5000), torch.ones(2, dtype=torch.bool)]}
    told = unpacked([packed(values), packed(values, variables, is_asked=True, sign=2)])
    numbers, halves, plain, large, text = told.known

    assert (told.is_asked, told.signs) == (True, [0, 2])
    assert str(told.variables) == str([{}, variables])
    assert numbers is not None
    assert str(numbers) == str(values[0].values * 2)
    assert halves is not None
    assert [(one.dtype, one.shape) for one in halves] == 2 * [
        (torch.bfloat16, (2, 3)),
        (torch.bfloat16, (0, 3)),
    ]
    assert plain == (3, True, 3, True)
    assert large is None
    assert text is None
