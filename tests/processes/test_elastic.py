"""Workers of an elastic job are killed, and the others end with the bits of an undisturbed job."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.utils.data import DataLoader, TensorDataset
from worker_threads import communicator_of

import unisono as uo
from processes.crew import Crew, Desk
from processes.elastic_programs import tell_of_updates
from processes.harness import Ranks, run_ranks, strategy_of
from processes.ports import free_ports
from unisono.workers import joining

NUM_REPLICAS = 5

# Who is killed, in which run, and where.
Plan = dict[int, tuple[int, str]]


class Fate:
    """Kills this process at one point of one run."""

    def __init__(self, rank: int, plan: Plan) -> None:
        self._run, self._point = plan.get(rank, (-1, ""))
        self.run = 0

    def __call__(self, point: str) -> None:
        if self.run == self._run and point == self._point:
            os.kill(os.getpid(), signal.SIGKILL)


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Program:
    """Trains, and can be joined in the middle."""

    def __init__(self, strategy: uo.MultiWorkerMirroredStrategy, fate: Fate) -> None:
        self.strategy, self.fate, self.num_steps = strategy, fate, 0
        generator = torch.Generator().manual_seed(7)
        data = TensorDataset(torch.randn(42, 6, generator=generator))
        torch.manual_seed(12)
        strategy.register_comm_hook(None, uo.hooks.Compress(error_feedback=True))
        with strategy.scope():
            self.model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.2))
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
            # Workers that join get all variables, also one that is not in the checkpoint.
            self.own = uo.Variable(
                0.0,
                synchronization=uo.VariableSynchronization.ON_READ,
                aggregation=uo.VariableAggregation.SUM,
            )
            self.shift = uo.Variable(torch.zeros(9), aggregation=uo.VariableAggregation.MEAN)
            self.optimizer.add_param_group({"params": [self.shift]})
        loader = DataLoader(data, batch_size=16, shuffle=True)
        self.batches = strategy.experimental_distribute_dataset(loader)
        self.checkpoint = uo.experimental.Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            input=self.batches,
            progress=self,
            own=self.own,
        )
        if strategy.extended.elastic is not None:
            strategy.experimental_admit(self.checkpoint)

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]

    def step(self, inputs: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = (self.model(inputs) + self.shift).square().mean()
        self.own.assign_add(loss.detach())
        loss.backward()
        self.fate("after the backward pass")
        self.optimizer.step()
        return loss.detach()

    def run(self, path: str, wait_at: int) -> dict[str, Any]:
        while self.num_steps < 14:
            for (inputs,) in self.batches:
                self.fate.run = self.num_steps
                if self.num_steps == wait_at:
                    self._wait_for_newcomer()
                self.strategy.run(self.step, args=(inputs,))
                self.num_steps += 1
                if self.num_steps in (6, 12):
                    self.checkpoint.save(f"{path}-{self.num_steps}")
                if self.num_steps == 14:
                    break
        found = self.model.state_dict() | {"own": self.own.value(), "shift": self.shift.value()}
        for i, state in enumerate(self.optimizer.state.values()):
            found |= {f"{name} {i}": value for name, value in state.items()}
        bits = {name: one.detach().numpy().tobytes() for name, one in found.items()}
        return bits | {"next random number": torch.rand(1).item()}

    def _wait_for_newcomer(self) -> None:
        job = self.strategy.extended.elastic
        assert job is not None
        deadline = time.monotonic() + 60
        # One that was quick has joined already.
        while len(job.members.met.members) < 3 and not job.members.newcomers():
            assert time.monotonic() < deadline, "nobody came"
            time.sleep(0.01)


def join_in(desk: Desk, rank: int, ports: list[int], plan: Plan, path: str, wait_at: int) -> Any:
    torch.manual_seed(rank)
    elastic = len(ports) > 1
    strategy = strategy_of(rank, ports, 1, num_replicas=NUM_REPLICAS, elastic=elastic)
    try:
        return Program(strategy, Fate(rank, plan)).run(path, wait_at)
    finally:
        strategy.close()


def train(strategy: uo.Strategy, fate: Fate, has_hooks: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.arange(44.0),
        torch.randn(44, 20, generator=generator),
        torch.randint(3, (44,), generator=generator),
    )
    if has_hooks:
        state = powerSGD_hook.PowerSGDState(
            strategy.process_group, matrix_approximation_rank=2, start_powerSGD_iter=2
        )
        strategy.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    with strategy.scope():
        torch.manual_seed(11)
        model = nn.Sequential(
            nn.Linear(20, 40), nn.BatchNorm1d(40), nn.Dropout(0.3), nn.Linear(40, 3)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        # Of the replicas' own, of all replicas, and trained.
        own = uo.Variable(
            torch.zeros(2, dtype=torch.float64),
            synchronization=uo.VariableSynchronization.ON_READ,
            aggregation=uo.VariableAggregation.SUM,
        )
        mean = uo.Variable(1.0, trainable=False, aggregation=uo.VariableAggregation.MEAN)
        scale = uo.Variable(torch.ones(3), aggregation=uo.VariableAggregation.MEAN)
        optimizer.add_param_group({"params": [scale]})
        average = nn.Linear(20, 40)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    if has_hooks:
        optimizer.register_step_pre_hook(lambda *_: fate("at the update"))
        optimizer.register_step_post_hook(lambda *_: fate("after the update"))
    else:
        tell_of_updates(strategy, fate)
    first = next(model.parameters())
    first.register_hook(lambda _: fate("in the backward pass"))

    def follow() -> None:
        for one, other in zip(average.parameters(), model[0].parameters(), strict=True):
            one.data.lerp_(other.data, 0.1)

    def step(numbers: Tensor, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs) * scale, labels)
        own.assign_add(torch.stack([loss.detach(), numbers.sum()]))
        fate("before the backward pass")
        (scaler.scale(loss) if has_hooks else loss).backward()
        fate("after the backward pass")
        mean.assign(0.5 * mean + loss.detach())
        if has_hooks:
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            uo.once(follow)
        else:
            optimizer.step()
        fate("at the end")
        return loss.detach(), numbers

    loader = DataLoader(data, batch_size=16, shuffle=True)
    distributed = strategy.experimental_distribute_dataset(loader)
    losses, samples = [], []
    for _ in range(3):
        for batch in distributed:
            fate("before the run")
            loss, numbers = strategy.run(step, args=batch)
            if not has_hooks:
                scheduler.step()
            fate("after the run")
            losses += [strategy.reduce("MEAN", loss), own.value().sum(), mean.value()]
            samples.append(strategy.gather(numbers, axis=0))
            fate.run += 1
    found = {"losses": torch.stack(losses), "samples": torch.cat(samples)} | model.state_dict()
    found |= {"own": own.value(), "mean": mean.value(), "scale": scale.value()}
    found |= {f"average {name}": one for name, one in average.state_dict().items()}
    for i, state in enumerate(optimizer.state.values()):
        found |= {f"{name} {i}": value for name, value in state.items()}
    found["next random number"] = torch.rand(1)
    bits = {name: one.detach().numpy().tobytes() for name, one in found.items()}
    return bits | {"lr": scheduler.get_last_lr(), "loss scale": scaler.get_scale()}


def work(
    store: Store,
    rank: int,
    size: int,
    ports: list[int],
    plan: Plan,
    elastic: bool,
    has_hooks: bool,
) -> Any:
    log = Lines()
    logging.getLogger("unisono").addHandler(log)
    torch.manual_seed(rank)
    strategy = strategy_of(rank, ports, 1, num_replicas=NUM_REPLICAS, elastic=elastic)
    # A cycle of references may keep it for a while.
    first = communicator_of(strategy)
    try:
        return train(strategy, Fate(rank, plan), has_hooks), log.lines
    finally:
        strategy.close()
        assert not any(first in joined.users for joined in joining._stores.values())


def survivors_of(size: int, plan: Plan, *, has_hooks: bool = True) -> dict[int, Any]:
    with Ranks(size, work, free_ports(size), plan, True, has_hooks) as ranks:
        found = ranks.results(100)
    assert sorted(found) == sorted(set(range(size)) - set(plan))
    return found


def undisturbed(*, has_hooks: bool = True) -> Any:
    ((alone, _),) = run_ranks(1, work, free_ports(1), {}, False, has_hooks)
    return alone


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in expected if found[name] != expected[name]]


def test_survivors_of_kills_in_a_step_have_the_bits_of_an_undisturbed_job() -> None:
    plan = {
        3: (1, "in the backward pass"),
        0: (3, "at the update"),
        2: (6, "after the update"),
    }
    expected = undisturbed()
    for _, (found, lines) in survivors_of(4, plan).items():
        assert differing(found, expected) == []
        assert len([line for line in lines if line.startswith("Lost worker")]) == 3


def test_survivors_of_kills_around_an_update_that_waits_have_the_same_bits() -> None:
    plan = {
        0: (1, "at the update"),
        3: (3, "after the update"),
        2: (5, "at the end"),
        1: (7, "after the run"),
    }
    expected = undisturbed(has_hooks=False)
    for _, (found, _) in survivors_of(5, plan, has_hooks=False).items():
        assert differing(found, expected) == []


def test_a_worker_that_is_started_again_joins_and_the_bits_stay_the_same(tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    with Crew(1) as crew:
        crew.members[0].begin(join_in, 0, free_ports(1), {}, str(tmp_path / "alone"), -1)
        expected = crew.members[0].hear(60)
    ports = free_ports(3)
    plan = {2: (1, "after the backward pass"), 0: (9, "after the backward pass")}
    with Crew(3) as crew:
        for rank, member in enumerate(crew.members):
            # Only the first waits: the others come to its commit.
            member.begin(join_in, rank, ports, plan, path, 4 if rank == 0 else -1)
        crew.members[2].wait_for_its_end(60)
        crew.replace(2)
        crew.members[2].begin(join_in, 2, ports, {}, path, -1)
        found = [crew.members[rank].hear(90) for rank in (1, 2)]

    assert [differing(one, expected) for one in found] == [[], []]
    assert sorted(one.name for one in tmp_path.glob("saved*")) == ["saved-12", "saved-6"]
