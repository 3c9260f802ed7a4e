"""Small trainings that tests run eagerly and captured: both must give the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

import unisono as uo
from unit.functions.program_parts import (
    NUM_STEPS,
    Codebook,
    Mark,
    Plain,
    Program,
    batch,
    convnet,
    kind_of,
    learn,
    loss_of,
    recordings,
    replicas,
    with_dropout,
)


def clipping(strategy: uo.Strategy, mark: Mark, num_steps: int) -> Iterator[Any]:
    with strategy.scope():
        model = convnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    @mark
    def step(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model, images, labels)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss.detach(), norm

    for i in range(num_steps):
        yield strategy.run(step, args=batch(strategy, i))
    yield model.state_dict()


def scheduling(strategy: uo.Strategy, mark: Mark, num_steps: int) -> Iterator[Any]:
    with strategy.scope():
        model = convnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

    @mark
    def step(images: Tensor, labels: Tensor) -> Tensor:
        return learn(model, optimizer, images, labels)

    for i in range(num_steps):
        yield strategy.run(step, args=batch(strategy, i))
        scheduler.step()
        yield torch.tensor(optimizer.param_groups[0]["lr"])
    yield model.state_dict()


def scheduling_inside(strategy: uo.Strategy, mark: Mark, num_steps: int) -> Iterator[Any]:
    with strategy.scope():
        model = convnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

    @mark
    def step(images: Tensor, labels: Tensor) -> Tensor:
        loss = learn(model, optimizer, images, labels)
        scheduler.step()
        return loss

    for i in range(num_steps):
        yield strategy.run(step, args=batch(strategy, i))
        yield torch.tensor(optimizer.param_groups[0]["lr"])
    yield model.state_dict()


def rarely_scheduled(strategy: uo.Strategy, mark: Mark, num_steps: int) -> Iterator[Any]:
    with strategy.scope():
        model = convnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    @mark
    def step(images: Tensor, labels: Tensor) -> Tensor:
        return learn(model, optimizer, images, labels)

    for i in range(2 * num_steps):
        if i == num_steps:
            optimizer.param_groups[0]["lr"] = 0.05
        if i == num_steps + 3:
            optimizer.load_state_dict(optimizer.state_dict())
            with torch.no_grad():
                next(model.parameters()).mul_(0.5)
        yield strategy.run(step, args=batch(strategy, i))
    yield model.state_dict()


def scaling(strategy: uo.Strategy, mark: Mark, num_steps: int) -> Iterator[Any]:
    kind = kind_of(strategy)
    dtype = torch.float16 if kind == "cuda" else torch.bfloat16
    with strategy.scope():
        model = convnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(kind, init_scale=2.0**120, growth_interval=2)

    @mark
    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(kind, dtype):
            loss = loss_of(model, images, labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    for i in range(num_steps):
        yield strategy.run(step, args=batch(strategy, i))
        yield torch.tensor(scaler.get_scale())
    yield model.state_dict()


def accumulating(strategy: uo.Strategy, mark: Mark, num_steps: int) -> Iterator[Any]:
    with strategy.scope():
        model = convnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @mark
    def collect(images: Tensor, labels: Tensor) -> Tensor:
        loss = loss_of(model, images, labels) / 3
        loss.backward()
        return loss.detach()

    @mark
    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for i in range(num_steps):
        for j in range(3):
            yield strategy.run(collect, args=batch(strategy, 10 * i + j))
        strategy.run(update)
    yield model.state_dict()


def clearing_outside(strategy: uo.Strategy, mark: Mark, num_steps: int) -> Iterator[Any]:
    with strategy.scope():
        model = convnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @mark
    def step(images: Tensor, labels: Tensor) -> Tensor:
        loss = loss_of(model, images, labels)
        loss.backward()
        return loss.detach()

    for i in range(num_steps):
        optimizer.zero_grad()
        yield strategy.run(step, args=batch(strategy, i))
        yield [parameter.grad for parameter in model.parameters()]
        optimizer.step()
    yield model.state_dict()


def uneven(strategy: uo.Strategy, mark: Mark, num_steps: int) -> Iterator[Any]:
    with strategy.scope():
        model = convnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @mark
    def step(images: Tensor, labels: Tensor) -> Tensor:
        return learn(model, optimizer, images, labels)

    made = torch.Generator().manual_seed(7)
    images, labels = torch.randn(34, 3, 8, 8, generator=made), torch.arange(34) % 4
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), 12)
    batches = strategy.experimental_distribute_dataset(loader)
    for _ in range(num_steps):
        for own in batches:
            losses = strategy.run(step, args=own)
            yield losses
            yield strategy.reduce("MEAN", losses)
    yield model.state_dict()


def evaluating(strategy: uo.Strategy, mark: Mark, num_steps: int) -> Iterator[Any]:
    with strategy.scope():
        model = nn.Sequential(convnet(), nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @mark
    def step(images: Tensor, labels: Tensor) -> Tensor:
        return learn(model, optimizer, images, labels)

    @mark
    def evaluate(images: Tensor) -> Tensor:
        with torch.no_grad():
            outputs: Tensor = model(images)
            return outputs

    for i in range(num_steps):
        model.train()
        for j in range(2):
            yield strategy.run(step, args=batch(strategy, 10 * i + j))
        model.eval()
        yield strategy.run(evaluate, args=batch(strategy, 10 * i + 5)[:1])
    yield model.state_dict()


def averaging(strategy: uo.Strategy, mark: Mark, num_steps: int) -> Iterator[Any]:
    with strategy.scope():
        model, teacher = convnet(), convnet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averaged = AveragedModel(model)
    calls: list[float] = []

    def follow(loss: Any) -> None:
        calls.append(1.0)
        with torch.no_grad():
            for own, other in zip(teacher.parameters(), model.parameters(), strict=True):
                own.lerp_(other, 0.1)

    @mark
    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, images, labels) + teacher(images).square().mean()
        loss.backward()
        optimizer.step()
        uo.once(follow, loss.detach())
        averaged.update_parameters(model)
        return cast(Tensor, loss.detach())

    for i in range(num_steps):
        yield strategy.run(step, args=batch(strategy, i))
        yield torch.tensor(calls)
    yield [model.state_dict(), teacher.state_dict(), averaged.state_dict()]


def adversaries(strategy: uo.Strategy, mark: Mark, num_steps: int) -> Iterator[Any]:
    is_on_gpus = kind_of(strategy) == "cuda"
    with strategy.scope():
        torch.manual_seed(0)
        generator, critic = nn.Linear(5, 3 * 64), nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 1))
        for_generator = torch.optim.Adam(generator.parameters(), capturable=is_on_gpus)
        for_critic = torch.optim.SGD(critic.parameters(), lr=0.1)

    @mark
    def step(images: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.randn(len(images), 5, device=images.device)
        made = generator(noise).view(-1, 3, 8, 8)
        for_critic.zero_grad()
        lost = critic(made.detach()).mean() - critic(images).mean()
        lost.backward()
        for_critic.step()
        for_generator.zero_grad()
        won = -critic(made).mean()
        won.backward()
        for_generator.step()
        return lost.detach(), won.detach()

    for i in range(num_steps):
        yield strategy.run(step, args=batch(strategy, i)[:1])
    yield [generator.state_dict(), critic.state_dict()]


def counting(strategy: uo.Strategy, mark: Mark, num_steps: int) -> Iterator[Any]:
    with strategy.scope():
        model = convnet()
        total = uo.Variable(torch.zeros(()), aggregation=uo.VariableAggregation.SUM)

    @mark
    def step(images: Tensor, labels: Tensor) -> Tensor:
        loss = loss_of(model, images, labels).detach()
        total.assign_add(loss)
        context = uo.get_replica_context()
        assert context is not None
        return cast(Tensor, context.all_reduce("SUM", loss))

    for i in range(num_steps):
        yield strategy.run(step, args=batch(strategy, i))
        yield total.read_value().clone()


def buffers_in_between(
    strategy: uo.Strategy, mark: Mark, num_steps: int, *, replaces: bool = False
) -> Iterator[Any]:
    with strategy.scope():
        torch.manual_seed(0)
        model = Codebook(replaces=replaces)
        readout = nn.Linear(200, 4)
        seen = nn.Linear(192, 200, bias=False)
        optimizer = torch.optim.SGD(readout.parameters(), lr=0.1)

    def look() -> None:
        with torch.no_grad():
            seen.weight.copy_(model.table + model.replaced)
            model.table.clamp_(-2, 2)

    @mark
    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        codes = model(images)
        uo.once(look)
        loss = functional.cross_entropy(readout(codes + seen(images.flatten(1))), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for i in range(num_steps):
        # Now and then in another signature, which is still eager.
        yield strategy.run(step, args=batch(strategy, i, 5 if i in (5, 7) else 6))
        yield model.state_dict()
    yield [readout.state_dict(), seen.state_dict()]


def written_by_hand(strategy: uo.Strategy, mark: Mark, num_steps: int) -> Iterator[Any]:
    with strategy.scope():
        torch.manual_seed(0)
        model = nn.Linear(192, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @mark
    def step(images: Tensor, labels: Tensor) -> Tensor:
        loss = functional.cross_entropy(model(images.flatten(1)), labels)
        parameters = list(model.parameters())
        for one, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            one.grad = grad
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for i in range(num_steps):
        yield strategy.run(step, args=batch(strategy, i))
    yield model.state_dict()


class Words(nn.Module):
    """Numbers the brightness of pixels, and looks each number up in a table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 4, sparse=True)

    def forward(self, images: Tensor) -> Tensor:
        numbers = (images.flatten(1) * 2 + 4).long().clamp(0, 8)
        found: Tensor = self.table(numbers).mean(dim=1)
        return found


PROGRAMS: dict[str, Program] = {
    "SGD": Plain(lambda own: torch.optim.SGD(own, lr=0.1)),
    "SGD with momentum": Plain(lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9)),
    "Adam": Plain(lambda own: torch.optim.Adam(own, lr=0.01)),
    "Adam, capturable": Plain(lambda own: torch.optim.Adam(own, lr=0.01, capturable=True)),
    "dropout": Plain(lambda own: torch.optim.SGD(own, lr=0.1), with_dropout),
    "clipping": clipping,
    "a rate that changes": scheduling,
    "a rate that changes inside": scheduling_inside,
    "a rate that changes once": rarely_scheduled,
    "a scaler": scaling,
    "accumulation": accumulating,
    "cleared outside": clearing_outside,
    "uneven batches": uneven,
    "evaluation": evaluating,
    "averages": averaging,
    "two optimizers": adversaries,
    "a variable": counting,
    "large buffers": buffers_in_between,
    "gradients written by hand": written_by_hand,
    "sparse gradients": Plain(lambda own: torch.optim.SGD(own, lr=0.1), Words),
    "SparseAdam": Plain(lambda own: torch.optim.SparseAdam(list(own), lr=0.01), Words),
}
# Several GPUs exchange no sparse gradients between two graphs.
_FOR_CPUS = {"sparse gradients", "SparseAdam"}


def programs_for(kind: str) -> dict[str, Program]:
    """Returns the programs that run on a kind of device."""
    left_out = {"Adam, capturable"} if kind == "cpu" else _FOR_CPUS
    return {name: one for name, one in PROGRAMS.items() if name not in left_out}


def check_same_bits(name: str, kind: str, number: int, *, are_separate: bool = False) -> None:
    """Runs a program eagerly and captured."""
    if name not in programs_for(kind):
        pytest.skip("it is for the other kind of device")
    with replicas(kind, number, are_separate=are_separate) as strategy:
        wanted = outcome(PROGRAMS[name], strategy, lambda step: step)
    with replicas(kind, number, are_separate=are_separate) as strategy:
        found = outcome(PROGRAMS[name], strategy, uo.function(strict=True))
        assert recordings(strategy)
    assert len(found) == len(wanted)
    for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(one, other), f"result {place} of {len(wanted)}"


def tensors_in(found: Any) -> Iterator[Tensor]:
    """Yields copies of all tensors in what a program has yielded."""
    if isinstance(found, Tensor):
        yield found.detach().clone()
    elif isinstance(found, uo.DistributedValues):
        for part in found.values:
            yield from tensors_in(part)
    elif isinstance(found, dict):
        yield from tensors_in(list(found.values()))
    elif isinstance(found, (list, tuple)):
        for part in found:
            yield from tensors_in(part)


def outcome(
    program: Program, strategy: uo.Strategy, mark: Mark, num_steps: int = NUM_STEPS
) -> list[Tensor]:
    """Runs a program, and returns all that it has yielded."""
    torch.manual_seed(3)
    return [one for found in program(strategy, mark, num_steps) for one in tensors_in(found)]
