"""`unisono.once`, and the programs that need it: N replicas end with the weights of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from on_replica import replica_id
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import unisono as uo
from unisono.errors import ContextError, UnequalCallsError

Make = Callable[..., uo.MirroredStrategy]
Step = Callable[[Tensor, Tensor], Any]

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(12, 2)
Y = X.square().sum(1, keepdim=True)


def net() -> nn.Module:
    """A model that starts with the same weights always, also where workers are threads."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    for number, p in enumerate(model.parameters()):
        p.data = torch.linspace(-1, 0.8, p.numel(), dtype=p.dtype).add(number / 9).view(p.shape)
    return model


def split(num_replicas: int) -> tuple[Any, Any]:
    """The batch in even parts, and uneven ones for 3 replicas: 6, 4 and 2 samples."""
    sizes = {1: [12], 2: [6, 6], 3: [6, 4, 2]}[num_replicas]
    return uo.PerReplica(X.split(sizes)), uo.PerReplica(Y.split(sizes))


def weights(*models: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for model in models for p in model.parameters()]


def same(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    mean: Tensor = (model(x) - y).square().mean()
    return mean


class Program:
    """A model, its optimizer and a step; `result` is what must not depend on the replicas."""

    def __init__(self) -> None:
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def backward(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        loss(self.model, x, y).backward()

    def step(self, x: Tensor, y: Tensor) -> None:
        raise NotImplementedError

    def result(self) -> list[Tensor]:
        return weights(self.model)


class Teacher(Program):
    """A teacher that is a moving average of its student, and whose targets the student learns."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.model)

    def follow(self) -> None:
        for mine, other in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            mine.data.mul_(0.9).add_(other.data, alpha=0.1)

    def step(self, x: Tensor, y: Tensor) -> None:
        with torch.no_grad():
            target = self.teacher(x) + y
        self.backward(x, target)
        self.optimizer.step()
        uo.once(self.follow)

    def result(self) -> list[Tensor]:
        return weights(self.model, self.teacher)


class Averaged(Program):
    """torch's own moving average, which needs no `once`."""

    def __init__(self) -> None:
        super().__init__()
        self.averaged = AveragedModel(
            self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True
        )

    def step(self, x: Tensor, y: Tensor) -> None:
        self.backward(x, y)
        self.optimizer.step()
        self.averaged.update_parameters(self.model)

    def result(self) -> list[Tensor]:
        assert self.averaged.n_averaged == 3
        return weights(self.model, self.averaged)


class SharpnessAware(Program):
    """SAM by hand: a second gradient is taken at a worse point nearby."""

    def climb(self) -> list[Tensor]:
        parameters = list(self.model.parameters())
        norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        moves = [0.05 * p.grad / norm for p in parameters if p.grad is not None]
        self.move(moves, 1)
        return moves

    @torch.no_grad()
    def move(self, moves: list[Tensor], sign: int) -> None:
        for p, move in zip(self.model.parameters(), moves, strict=True):
            p.add_(move, alpha=sign)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.backward(x, y)
        moves = uo.once(self.climb)
        self.backward(x, y)
        uo.once(self.move, moves, -1)
        self.optimizer.step()


class Lookahead(Program):
    """Lookahead by hand: slow weights, which the fast ones go back to."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = weights(self.model)

    @torch.no_grad()
    def go_back(self, model: nn.Module) -> None:
        for slow, p in zip(self.slow, model.parameters(), strict=True):
            p.copy_(slow.lerp_(p, 0.5))

    def step(self, x: Tensor, y: Tensor) -> None:
        for _ in range(2):
            self.backward(x, y)
            self.optimizer.step()
        uo.once(self.go_back, self.model)


class ByHand(Program):
    """Gradient descent without an optimizer, through everything that writes weights."""

    def descend(self, head: nn.Linear) -> None:
        for p in self.model.parameters():
            assert p.grad is not None
            p.data -= 0.1 * p.grad
        nn.init.constant_(head.bias, 0.5)
        flat = nn.utils.parameters_to_vector(self.model.parameters())
        nn.utils.vector_to_parameters(flat.detach() * 0.9, self.model.parameters())
        self.model.load_state_dict(self.model.state_dict())

    def step(self, x: Tensor, y: Tensor) -> None:
        self.model.zero_grad()
        loss(self.model, x, y).backward()
        uo.once(self.descend, self.model[2])  # type: ignore[index]
        self.model.zero_grad()
        loss(self.model, x, y).backward()
        uo.once(self.descend, head=self.model[2])  # type: ignore[index]


def check_weights(mirrored: Make, program: type[Program], num_replicas: int) -> None:
    """Replicas must end with the weights of one device."""
    plain = program()
    for _ in range(3):
        plain.step(X, Y)
    strategy = mirrored(num_replicas)
    with strategy.scope():
        made = program()

    for _ in range(3):
        strategy.run(made.step, args=split(num_replicas))

    same(made.result(), plain.result())


PROGRAMS = [Teacher, Averaged, SharpnessAware, Lookahead, ByHand]


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("program", PROGRAMS)
def test_replicas_end_with_the_weights_of_one_device(
    mirrored: Make, memories: str, program: type[Program], num_replicas: int
) -> None:
    check_weights(mirrored, program, num_replicas)


def test_every_replica_gets_the_one_result(mirrored: Make, memories: str) -> None:
    strategy = mirrored(3)
    calls: list[Any] = []

    def record(shared: str, own: Any) -> int:
        calls.append((shared, own.values))
        assert uo.in_cross_replica_context()
        return len(calls)

    def step() -> int:
        return uo.once(record, "same", own=replica_id())

    assert strategy.run(step) == 1
    assert calls == [("same", (0, 1, 2))]


def test_of_what_differs_every_replica_gets_its_own(mirrored: Make) -> None:
    strategy = mirrored(2)

    def step() -> Any:
        return uo.once(lambda own: (own, "all"), replica_id())

    own, shared = strategy.run(step)

    assert own.values == (0, 1)
    assert shared == "all"


def test_outside_a_step_the_function_is_just_called(mirrored: Make) -> None:
    strategy = mirrored(2)

    with strategy.scope():
        assert uo.once(lambda a, b: a + b, 1, b=2) == 3
    assert uo.once(lambda: uo.once(int)) == 0
    assert strategy.run(lambda: uo.once(lambda: uo.once(int))) == 0


def test_a_run_in_once_is_refused_because_its_writes_would_be_lost(mirrored: Make) -> None:
    strategy = mirrored(2)

    with pytest.raises(ContextError, match="outside the step, or in a `merge_call`"):
        strategy.run(lambda: uo.once(lambda: strategy.run(int)))
    assert strategy.run(lambda: uo.once(int)) == 0


def test_parts_of_a_model_arrive_as_those_of_the_program(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = net()
    seen: list[Any] = []

    def step() -> None:
        uo.once(lambda *parts: seen.extend(parts), model, model[0], model[0].weight)  # type: ignore[index]

    strategy.run(step)

    assert seen[0] is model
    assert seen[1] is model[0]
    assert seen[2] is model[0].weight


def test_an_error_ends_the_step(mirrored: Make) -> None:
    strategy = mirrored(2)

    def fail() -> None:
        raise LookupError("in once")

    with pytest.raises(LookupError, match="in once"):
        strategy.run(lambda: uo.once(fail))
    assert strategy.run(lambda: 1) == 1


def test_replicas_that_call_different_things_are_named(mirrored: Make) -> None:
    strategy = mirrored(2)

    def one() -> None: ...

    def other() -> None: ...

    with pytest.raises(UnequalCallsError, match=r"0 is in once\(.*one\).*1 is in once\(.*other\)"):
        strategy.run(lambda: uo.once(one if replica_id() == 0 else other))


def test_random_numbers_are_the_same_in_every_run_of_a_program(mirrored: Make) -> None:
    def drawn(num_replicas: int) -> list[float]:
        torch.manual_seed(3)
        strategy = mirrored(num_replicas)

        def step() -> float:
            own = torch.rand(())
            first, second = uo.once(torch.rand, ()), uo.once(torch.rand, ())
            assert len({float(own), float(first), float(second)}) == 3
            return float(first + second)

        return list(strategy.experimental_local_results(strategy.run(step)))

    assert drawn(2) == drawn(2)
    assert len(set(drawn(2) + drawn(3))) == 1


def test_what_is_written_to_a_module_reaches_the_replicas_at_once(
    mirrored: Make, memories: str
) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model: Any = nn.BatchNorm1d(2)
        model.steps = 0

    def change() -> None:
        model.steps += 1
        model.weight.data.fill_(5.0)
        model.running_mean.fill_(7.0)

    def step() -> Any:
        uo.once(change)
        return model.steps, model.weight.sum().item(), model.running_mean.sum().item()

    found = strategy.experimental_local_results(strategy.run(step))

    assert set(found) == {(1, 10.0, 14.0)}
    assert model.steps == 1


def test_gradients_are_those_of_all_replicas_and_can_be_changed(
    mirrored: Make, memories: str
) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    nn.init.zeros_(model.weight)

    def double() -> float:
        assert model.weight.grad is not None
        before = model.weight.grad.item()
        model.weight.grad.mul_(2)
        return before

    def step(x: Tensor) -> Any:
        model.zero_grad()
        model(x).sum().backward()
        before = uo.once(double)
        assert model.weight.grad is not None
        after = model.weight.grad.item()
        optimizer.step()
        model.zero_grad()
        assert uo.once(lambda: model.weight.grad) is None
        return before, after

    parts = uo.PerReplica((torch.full((1, 1), 1.0), torch.full((1, 1), 10.0)))
    found = strategy.experimental_local_results(strategy.run(step, args=(parts,)))

    assert set(found) == {(5.5, 11.0)}
    assert model.weight.item() == -11


def test_a_backward_pass_for_all_replicas_waits_for_nobody(mirrored: Make) -> None:
    strategy = mirrored(2)

    def step() -> float:
        def slope() -> float:
            x = torch.ones((), requires_grad=True)
            (3 * x).backward()
            assert x.grad is not None
            return x.grad.item()

        return uo.once(slope)

    assert strategy.run(step) == 3
