"""Weights that replicas write themselves are refused, with the name of the parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import unisono as uo
from unisono.errors import ContextError

Make = Callable[..., uo.MirroredStrategy]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(2, 2)
        self.bn = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.bn(self.encoder(x))
        return out


class ModelEma(nn.Module):
    """As timm has it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        pairs = zip(self.module.state_dict().values(), model.state_dict().values(), strict=True)
        for mine, other in pairs:
            mine.copy_(0.9 * mine + 0.1 * other)


def in_place(model: Net) -> None:
    with torch.no_grad():
        model.encoder.weight -= 0.1


def through_data(model: Net) -> None:
    model.encoder.weight.data.add_(0.1)


def through_detach(model: Net) -> None:
    model.encoder.weight.detach().mul_(0.1)


def with_foreach(model: Net) -> None:
    torch._foreach_add_([p.data for p in model.encoder.parameters()], 0.1)


def by_initialization(model: Net) -> None:
    nn.init.zeros_(model.encoder.weight)


def by_loading(model: Net) -> None:
    model.load_state_dict(model.state_dict())


def by_one_replica(model: Net) -> None:
    context = uo.get_replica_context()
    if context is not None and context.replica_id_in_sync_group == 1:
        model.encoder.weight.data.zero_()


WRITES = [in_place, through_data, through_detach, with_foreach]
WRITES += [by_initialization, by_loading, by_one_replica]


@pytest.mark.parametrize("write", WRITES)
def test_the_parameter_is_named_and_the_way_out(
    mirrored: Make, memories: str, write: Callable[[Net], None]
) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = Net()

    with pytest.raises(ContextError, match=r"`encoder.weight` of Net.*unisono.once\("):
        strategy.run(write, args=(model,))
    strategy.run(lambda: model.encoder.weight.sum().item())
    strategy.run(uo.once, args=(write, model))


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (in_place, "weight` of Net, which"),
        (with_foreach, "weight` of Net and 1 more parameter, which"),
    ],
)
def test_the_other_parameters_are_counted(
    mirrored: Make, write: Callable[[Net], None], words: str
) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = Net()

    with pytest.raises(ContextError, match=rf"A step wrote to `encoder.{words}"):
        strategy.run(write, args=(model,))


def test_a_parameter_that_was_kept_from_outside_is_watched_too(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = Net()
    kept = list(model.parameters())

    with pytest.raises(ContextError, match=r"`encoder.bias` of Net"):
        strategy.run(lambda: kept[1].data.add_(1.0).sum())


def test_the_next_update_sees_it_first(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    after: list[int] = []

    def step() -> None:
        model(torch.ones(3, 2)).sum().backward()
        in_place(model)
        optimizer.step()
        after.append(1)

    with pytest.raises(ContextError, match=r"`encoder.weight` of Net"):
        strategy.run(step)
    assert not after


def test_assigned_data_is_refused_at_once(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = Net()
    before = model.encoder.weight.detach().clone()

    def step() -> None:
        flat = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(flat * 2, model.parameters())

    with pytest.raises(ContextError, match=r"`data` of `encoder.weight` of Net was assigned"):
        strategy.run(step)
    assert torch.equal(model.encoder.weight, before)


@pytest.mark.parametrize("is_in_scope", [True, False])
def test_a_moving_average_of_the_model(mirrored: Make, is_in_scope: bool) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = Net()
        average = ModelEma(model)
    if not is_in_scope:
        average = ModelEma(model)

    with pytest.raises(ContextError, match=r"encoder.weight` of .*unisono.once\("):
        strategy.run(lambda: average.update(model))
    strategy.run(lambda: uo.once(average.update, model))


def test_a_copy_that_belongs_to_no_strategy(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = Net()
    target = copy.deepcopy(model)

    def follow() -> None:
        for mine, other in zip(target.parameters(), model.parameters(), strict=True):
            mine.data.lerp_(other.data, 0.5)

    strategy.run(lambda: uo.once(follow))
    with pytest.raises(ContextError, match=r"a copy of `encoder.weight` of Net"):
        strategy.run(follow)


def test_a_copy_that_is_made_in_the_scope_belongs_to_the_strategy(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = Net()
        target = copy.deepcopy(model)

    def step(x: Tensor) -> int:
        target.encoder(x).sum().backward()
        return id(target.encoder)

    strategy.run(step, args=(uo.PerReplica([torch.full((1, 2), 1.0), torch.full((1, 2), 3.0)]),))

    assert target.encoder.weight.grad is not None
    assert target.encoder.weight.grad.tolist() == [[2, 2], [2, 2]]


def test_buffers_may_be_written_by_each_replica(mirrored: Make) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = Net()

    strategy.run(lambda: model.bn.running_mean.add_(1.0).sum())  # type: ignore[union-attr]

    assert model.bn.running_mean.tolist() == [1, 1]  # type: ignore[union-attr]


def test_writes_outside_a_step_reach_every_memory(mirrored: Make, memories: str) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = Net()

    for value in (1.0, 2.0):
        model.encoder.weight.data.fill_(value)
        found = strategy.run(lambda: model.encoder.weight.sum().item())
        assert set(strategy.experimental_local_results(found)) == {4 * value}


def test_one_replica_may_write_as_it_likes(mirrored: Make) -> None:
    strategy = mirrored(1)
    with strategy.scope():
        model = Net()

    for write in WRITES:
        strategy.run(write, args=(model,))


def test_elsewhere_data_is_what_it_was() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    version = parameter._version

    parameter.data.add_(1)
    parameter.data = torch.full((3,), 2.0)

    assert parameter._version == version
    assert parameter.tolist() == [2, 2, 2]
    assert parameter.requires_grad


class Counting(nn.Module):
    """Has tensors as plain attributes, which replicas share."""

    def __init__(self, write: Callable[[Counting], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.steps = torch.zeros(())
        self.kept = {"sums": [torch.zeros(2)]}
        self._write = write

    def forward(self, x: Tensor) -> Tensor:
        self._write(self)
        out: Tensor = self.layer(x)
        return out


def count_in_place(model: Counting) -> None:
    model.steps += 1


def fill_what_a_list_holds(model: Counting) -> None:
    model.kept["sums"][0].fill_(2)


def count_in_a_new_tensor(model: Counting) -> None:
    model.steps = model.steps + 1


def count_once(model: Counting) -> None:
    uo.once(model.steps.add_, 1)


def trained(strategy: uo.Strategy, write: Callable[[Counting], None]) -> Counting:
    with strategy.scope():
        model = Counting(write)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()

    for _ in range(2):
        strategy.run(step)
    return model


@pytest.mark.parametrize(
    ("write", "name"), [(count_in_place, "steps"), (fill_what_a_list_holds, "kept")]
)
def test_tensors_in_attributes_are_refused_if_replicas_write_to_them(
    mirrored: Make, write: Callable[[Counting], None], name: str
) -> None:
    with pytest.raises(ContextError, match=rf"attribute `{name}` of Counting.*register_buffer"):
        trained(mirrored(2), write)


def test_tensors_in_attributes_may_be_replaced_or_written_once(mirrored: Make) -> None:
    assert trained(mirrored(2), count_in_a_new_tensor).steps == 0
    assert trained(mirrored(2), count_once).steps == 2
    assert trained(mirrored(1), count_in_place).steps == 2


def test_the_program_may_write_to_tensors_in_attributes_between_runs(mirrored: Make) -> None:
    strategy = mirrored(2)
    model = trained(strategy, lambda model: None)
    model.steps += 1

    assert strategy.experimental_local_results(strategy.run(lambda: model.steps + 0)) == (1, 1)
