"""Training programs that are drawn at random, for jobs that lose workers."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo
from unisono.modules.snapshot import Postponed

NUM_FEATURES, NUM_CLASSES = 12, 3
# Where a program says that it is, for something to happen there.
POINTS_OF_UPDATES = ("at the update", "after the update")
POINTS = (
    "before the run",
    "in the forward pass",
    "in the backward pass",
    "after the backward pass",
    *POINTS_OF_UPDATES,
    "at the end of the run",
    "after the run",
    "after the reduction",
)
At = Callable[[str], None]

_OPTIMIZERS: dict[str, Any] = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.05),
    "momentum": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": functools.partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.01),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.01, centered=True),
}
_SCHEDULES: dict[str, Any] = {
    "none": functools.partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0),
    "steps": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.5),
    "one cycle": functools.partial(
        torch.optim.lr_scheduler.OneCycleLR, max_lr=0.02, total_steps=200, cycle_momentum=False
    ),
}
MODELS = ("perceptron", "convolutions", "attention")
CLIPPING = ("none", "norm", "value")
# What else a step does.
EXTRAS = (
    "nothing",
    "two backward passes",
    "all-reduce after the update",
    "second optimizer",
    "average of the weights",
    "all-reduce before the update",
)
# What reduces gradients. The last two keep errors of each replica for its next step.
HOOKS_WITH_STATE = ("compress", "PowerSGD")
HOOKS = ("none", "none", "bfloat16", *HOOKS_WITH_STATE)


class Attention(nn.Module):
    """One layer with attention, over features as positions."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.down = nn.Linear(8, NUM_CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.down(self.layer(self.up(inputs.view(-1, 4, 3))).mean(1))
        return out


def _model(name: str) -> nn.Module:
    if name == "perceptron":
        return nn.Sequential(
            nn.Linear(NUM_FEATURES, 16),
            nn.BatchNorm1d(16),
            nn.Dropout(0.3),
            nn.Linear(16, NUM_CLASSES),
        )
    if name == "convolutions":
        return nn.Sequential(
            nn.Unflatten(1, (1, NUM_FEATURES)),
            nn.Conv1d(1, 4, 3, padding=1),
            nn.BatchNorm1d(4, momentum=None),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(4 * NUM_FEATURES, NUM_CLASSES),
        )
    return Attention()


@dataclass(frozen=True)
class Program:
    """What is trained, and how."""

    seed: int
    num_replicas: int
    model: str
    optimizer: str
    schedule: str
    clipping: str
    extra: str
    is_batch_norm_synchronized: bool
    evaluates: bool
    num_samples: int
    batch_size: int
    num_epochs: int
    # Whether hooks of the optimizer say where it is. Updates without hooks take other ways.
    watches_updates: bool = False
    # The communication hook.
    hook: str = "none"
    has_scaler: bool = False
    has_variables: bool = False

    @staticmethod
    def drawn(rng: random.Random, num_replicas: int) -> Program:
        """Draws one."""
        batch_size = num_replicas * rng.randint(2, 4) + rng.randrange(3)
        num_whole = rng.randint(2, 4)
        seed = rng.randrange(1 << 30)
        # Apart from the others, which are what they were before there were these.
        further = random.Random(seed)
        return Program(
            seed=seed,
            num_replicas=num_replicas,
            model=rng.choice(MODELS),
            optimizer=rng.choice(sorted(_OPTIMIZERS)),
            schedule=rng.choice(sorted(_SCHEDULES)),
            clipping=rng.choice(CLIPPING),
            extra=rng.choice(EXTRAS),
            is_batch_norm_synchronized=rng.random() < 0.3,
            evaluates=rng.random() < 0.4,
            # The last batch of an epoch is smaller.
            num_samples=num_whole * batch_size + rng.randrange(2 * num_replicas, batch_size + 1),
            batch_size=batch_size,
            num_epochs=2,
            hook=further.choice(HOOKS),
            has_scaler=further.random() < 0.3,
            has_variables=further.random() < 0.4,
        )

    @property
    def num_runs(self) -> int:
        """How many training steps there are."""
        return self.num_epochs * -(-self.num_samples // self.batch_size)

    def data(self) -> TensorDataset:
        """The samples: their numbers, inputs and labels."""
        generator = torch.Generator().manual_seed(self.seed)
        return TensorDataset(
            torch.arange(self.num_samples),
            torch.randn(self.num_samples, NUM_FEATURES, generator=generator),
            torch.randint(NUM_CLASSES, (self.num_samples,), generator=generator),
        )

    def loader(self) -> DataLoader[Any]:
        """The batches, in an order that a seed decides."""
        order = torch.Generator().manual_seed(self.seed + 1)
        return DataLoader(self.data(), self.batch_size, shuffle=True, generator=order)

    def samples(self) -> list[int]:
        """The numbers of the samples in the order in which one device sees them."""
        loader = self.loader()
        epochs = range(self.num_epochs)
        return [int(number) for _ in epochs for numbers, *_ in loader for number in numbers]


def tell_of_updates(strategy: uo.Strategy, at: At) -> None:
    """Says when updates are made that have waited for the end of their runs."""
    postponed = strategy.extended.mirrors.postponed
    if not isinstance(postponed, Postponed):
        return
    make = postponed.make

    def told() -> None:
        if postponed._update is not None:
            at(POINTS_OF_UPDATES[0])
            make()
            at(POINTS_OF_UPDATES[1])

    vars(postponed)["make"] = told


def register_hook(strategy: uo.Strategy, name: str) -> None:
    """Registers one of `HOOKS`."""
    assert isinstance(strategy, uo.MultiWorkerMirroredStrategy)
    if name == "bfloat16":
        strategy.register_comm_hook(strategy.process_group, default_hooks.bf16_compress_hook)
    elif name == "compress":
        strategy.register_comm_hook(None, uo.hooks.Compress(error_feedback=True))
    elif name == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(
            strategy.process_group, matrix_approximation_rank=1, start_powerSGD_iter=2
        )
        strategy.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class Training:
    """A program that is under way on one worker.

    Args:
        strategy: What it trains with.
        program: What it trains.
        at: Called with where it is.
        folder: Where it saves if all workers are preempted. Without it, SIGTERM ends the process.
    """

    def __init__(
        self, strategy: uo.Strategy, program: Program, at: At, folder: str | None = None
    ) -> None:
        self._strategy, self._program, self._at = strategy, program, at
        torch.manual_seed(program.seed)
        if program.hook != "none":
            register_hook(strategy, program.hook)
        with strategy.scope():
            self.model = _model(program.model)
            self.optimizer = _OPTIMIZERS[program.optimizer](self.model.parameters())
            self.scheduler = _SCHEDULES[program.schedule](self.optimizer)
            self.critic = nn.Linear(NUM_CLASSES, 1)
            self.second = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.5)
            self.average = torch.optim.swa_utils.AveragedModel(self.model, use_buffers=True)
            self.scaler = torch.amp.GradScaler(
                "cpu", init_scale=4.0, growth_interval=2, enabled=program.has_scaler
            )
            # One of each replica, and one of all.
            self.own = uo.Variable(
                torch.zeros(()),
                synchronization=uo.VariableSynchronization.ON_READ,
                aggregation=uo.VariableAggregation.SUM,
            )
            self.mean = uo.Variable(1.0, trainable=False, aggregation=uo.VariableAggregation.MEAN)
        if program.watches_updates:
            self.optimizer.register_step_pre_hook(lambda *_: at(POINTS_OF_UPDATES[0]))
            self.optimizer.register_step_post_hook(lambda *_: at(POINTS_OF_UPDATES[1]))
        else:
            tell_of_updates(strategy, at)
        next(self.model.parameters()).register_hook(lambda _: at("in the backward pass"))
        self._epoch = 0
        self._losses: list[Tensor] = []
        self._samples: list[Tensor] = []
        self._others: list[Tensor] = []
        self._batches = strategy.experimental_distribute_dataset(program.loader())
        unseen = DataLoader(program.data(), program.batch_size)
        self._unseen = strategy.experimental_distribute_dataset(unseen)
        self._handler: uo.experimental.PreemptionCheckpointHandler | None = None
        if isinstance(strategy, uo.MultiWorkerMirroredStrategy) and strategy.extended.elastic:
            checkpoint = uo.experimental.Checkpoint(
                model=self.model,
                optimizer=self.optimizer,
                scheduler=self.scheduler,
                critic=self.critic,
                second=self.second,
                average=self.average,
                scaler=self.scaler,
                own=self.own,
                mean=self.mean,
                input=self._batches,
                progress=self,
            )
            if folder is None:
                strategy.experimental_admit(checkpoint)
            else:
                self._handler = uo.experimental.PreemptionCheckpointHandler(
                    strategy.cluster_resolver, checkpoint, folder
                )

    def state_dict(self) -> dict[str, Any]:
        """What a worker that joins must know of the loop."""
        lists = {"losses": self._losses, "samples": self._samples, "others": self._others}
        return {"epoch": self._epoch, **{name: list(one) for name, one in lists.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where others are."""
        self._epoch, self._losses = state["epoch"], list(state["losses"])
        self._samples, self._others = list(state["samples"]), list(state["others"])

    def train(self, begin_run: Callable[[int], None]) -> dict[str, Any]:
        """Returns everything that a program can see at the end."""
        run = self._train_on if self._handler is None else self._run_with_handler
        while self._epoch < self._program.num_epochs:
            self.model.train()
            for batch in self._batches:
                begin_run(len(self._losses))
                run(batch)
            if self._program.evaluates:
                self._evaluate()
            self._epoch += 1
        return dict(self._found())

    def close(self) -> None:
        """Gives signals back to what they did before."""
        if self._handler is not None:
            self._handler.close()

    def _run_with_handler(self, batch: Any) -> None:
        assert self._handler is not None
        self._handler.run(self._train_on, batch)

    def _train_on(self, batch: Any) -> None:
        strategy, at = self._strategy, self._at
        at("before the run")
        results = strategy.run(self._step, args=batch)
        at("after the run")
        loss = strategy.reduce("MEAN", results["loss"])
        samples = strategy.gather(results["numbers"], axis=0)
        at("after the reduction")
        self._others.append(strategy.reduce("SUM", results["right"]))
        self._losses.append(loss)
        self._samples.append(samples)

    def _evaluate(self) -> None:
        self.model.eval()
        for batch in self._unseen:
            right = self._strategy.run(self._count_right, args=batch)
            self._others.append(self._strategy.reduce("SUM", right))

    def _step(self, numbers: Tensor, inputs: Tensor, labels: Tensor) -> dict[str, Any]:
        extra, context = self._program.extra, uo.get_replica_context()
        assert context is not None
        self.optimizer.zero_grad()
        scores = self.model(inputs)
        self._at("in the forward pass")
        loss = nn.functional.cross_entropy(scores, labels)
        self.scaler.scale(loss).backward()
        if extra == "two backward passes":
            self.scaler.scale(self.model(inputs.flip(0)).square().mean()).backward()
        if self._program.has_variables:
            self.own.assign_add(loss.detach())
            self.mean.assign(0.5 * self.mean + loss.detach())
        self._at("after the backward pass")
        if extra == "all-reduce before the update":
            loss = context.all_reduce("MEAN", loss.detach())
        self.scaler.unscale_(self.optimizer)
        if self._program.clipping == "norm":
            clip_grad_norm_(self.model.parameters(), 0.5)
        elif self._program.clipping == "value":
            clip_grad_value_(self.model.parameters(), 0.05)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self._program.schedule != "none":
            self.scheduler.step()
        if extra == "all-reduce after the update":
            loss = context.all_reduce("SUM", loss.detach()) + torch.rand(())
        elif extra == "second optimizer":
            self.second.zero_grad()
            self.critic(self.model(inputs).detach()).square().mean().backward()
            self.second.step()
        elif extra == "average of the weights":
            self.average.update_parameters(self.model)
        self._at("at the end of the run")
        right = (scores.argmax(1) == labels).sum()
        return {"loss": loss.detach(), "numbers": numbers, "right": right, "lines": len(inputs)}

    @torch.no_grad()
    def _count_right(self, numbers: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        right: Tensor = (self.model(inputs).argmax(1) == labels).sum()
        return right

    def _found(self) -> Iterator[tuple[str, Any]]:
        tensors = {
            "losses": torch.stack(self._losses),
            "others": torch.stack(self._others),
            **{f"model {name}": one for name, one in self.model.state_dict().items()},
            **{f"critic {name}": one for name, one in self.critic.state_dict().items()},
            **{f"average {name}": one for name, one in self.average.state_dict().items()},
            "own variable": self.own.value(),
            "mean variable": self.mean.value(),
            "loss scale": torch.tensor(self.scaler.get_scale()),
            "next random number": torch.rand(1),
        }
        for name, optimizer in (("first", self.optimizer), ("second", self.second)):
            for number, state in optimizer.state_dict()["state"].items():
                found = {f"{name} optimizer {key} {number}": one for key, one in state.items()}
                tensors |= {key: one for key, one in found.items() if isinstance(one, Tensor)}
        for name, one in tensors.items():
            yield name, one.detach().numpy().tobytes()
        yield "samples", torch.cat(self._samples).tolist()
        yield "learning rate", self.scheduler.get_last_lr()
