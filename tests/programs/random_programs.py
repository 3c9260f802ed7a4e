"""Training programs that are drawn at random, and run as a plain program and on replicas."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations
from torch.optim import Adagrad, Adam, AdamW, NAdam, RMSprop, lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import unisono as uo

NUM_WORDS, WIDTH, NUM_CLASSES = 7, 6, 3
BATCH_SIZE, NUM_BATCHES, NUM_EPOCHS = 4, 3, 2
SGD = functools.partial(torch.optim.SGD, lr=0.05)
OPTIMIZERS: dict[str, Any] = {
    "SGD": SGD,
    "momentum": functools.partial(SGD, momentum=0.9, nesterov=True, weight_decay=0.01),
    "fused SGD": functools.partial(SGD, momentum=0.9, fused=True),
    "single SGD": functools.partial(SGD, momentum=0.9, foreach=False),
    "maximizing SGD": functools.partial(SGD, maximize=True),
    "Adam": functools.partial(Adam, lr=0.01),
    # Schedulers write to the tensor, so each has its own.
    "Adam with a tensor": lambda groups: Adam(groups, lr=torch.tensor(0.01), foreach=False),
    "fused AdamW": functools.partial(AdamW, lr=0.01, fused=True),
    "fused Adagrad": functools.partial(Adagrad, lr=0.05, fused=True),
    "RMSprop": functools.partial(RMSprop, lr=0.01, momentum=0.5),
    "NAdam": functools.partial(NAdam, lr=0.01),
}
SCHEDULES: dict[str, Any] = {
    "none": lambda _: None,
    "steps": functools.partial(lr_scheduler.StepLR, step_size=2, gamma=0.5),
    "cosine": functools.partial(lr_scheduler.CosineAnnealingLR, T_max=10),
    "formula": functools.partial(lr_scheduler.LambdaLR, lr_lambda=lambda n: 1 / (1 + n)),
}
NETWORKS = ("plain", "checkpoint", "reentrant checkpoint", "recurrent", "weight norm")
CLIPPING = ("none", "norm", "largest", "value", "by hand")
PASSES = ("one", "one", "two losses", "penalty", "second optimizer", "second model at once")
AVERAGES = ("none", "none", "by hand", "averaged model")
CLEARING = ("to none", "to zero", "after the update", "by the model")
FREEZING = ("none", "none", "from the start", "between epochs")
AUTOCAST = ("none", "none", "with the loss", "weights used twice", "without a cache")


class Network(nn.Module):
    """Words and numbers in, classes out; no parameter is used in the same way as another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.words = nn.Embedding(NUM_WORDS, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.more = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(WIDTH))})
        self.unused = nn.Parameter(torch.ones(2))
        self.out = nn.Linear(WIDTH, NUM_CLASSES)
        if kind == "weight norm":
            parametrizations.weight_norm(self.up)

    def middle(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.down(torch.relu(self.up(hidden)))
        return result

    def forward(self, words: Tensor, numbers: Tensor) -> Tensor:
        hidden = self.words(words).mean(1) + numbers
        if "checkpoint" in self.kind:
            is_reentrant = self.kind.startswith("reentrant")
            hidden = hidden + checkpoint(self.middle, hidden, use_reentrant=is_reentrant)
        else:
            hidden = hidden + self.middle(hidden)
        if self.kind == "recurrent":
            hidden = self.memory(hidden.unsqueeze(1))[0].squeeze(1)
        result: Tensor = self.out(self.norm(hidden) * self.scale + self.more["shift"])
        return result


@dataclass(frozen=True)
class RandomProgram:
    """What is trained, and how."""

    seed: int
    num_replicas: int
    has_memories: bool
    network: str
    optimizer: str
    schedule: str
    clipping: str
    passes: str
    average: str
    clearing: str
    freezing: str
    num_accumulated: int
    has_no_sync: bool
    has_scaler: bool
    has_groups: bool
    has_logs: bool
    changes_rates: bool
    updates_outside: bool
    autocast: str

    @staticmethod
    def drawn(seed: int) -> RandomProgram:
        """Draws one."""
        rng = random.Random(seed)
        return RandomProgram(
            seed=seed,
            num_replicas=rng.choice((2, 3, 4)),
            has_memories=rng.random() < 0.5,
            network=rng.choice(NETWORKS),
            optimizer=rng.choice(sorted(OPTIMIZERS)),
            schedule=rng.choice(sorted(SCHEDULES)),
            clipping=rng.choice(CLIPPING),
            passes=rng.choice(PASSES),
            average=rng.choice(AVERAGES),
            clearing=rng.choice(CLEARING),
            freezing=rng.choice(FREEZING),
            num_accumulated=rng.choice((1, 1, 2, 3)),
            has_no_sync=rng.random() < 0.4,
            has_scaler=rng.random() < 0.4,
            has_groups=rng.random() < 0.4,
            has_logs=rng.random() < 0.4,
            changes_rates=rng.random() < 0.2,
            updates_outside=rng.random() < 0.2,
            autocast=rng.choice(AUTOCAST),
        )


class Training:
    """A program under way: without a strategy, as torch runs it."""

    num_epochs = NUM_EPOCHS

    def __init__(self, program: RandomProgram, strategy: uo.Strategy | None) -> None:
        self._program, self._strategy = program, strategy
        # Not a branch of the step, whose code would then name the rate.
        self._change_rates = self._lower_rates if program.changes_rates else None
        torch.manual_seed(program.seed)
        scope: AbstractContextManager[Any] = nullcontext() if strategy is None else strategy.scope()
        with scope:
            self.model = Network(program.network)
            if program.freezing == "from the start":
                self.model.words.weight.requires_grad_(False)
            self.optimizer = OPTIMIZERS[program.optimizer](self._groups())
            self.scheduler = SCHEDULES[program.schedule](self.optimizer)
            self.scaler = torch.amp.GradScaler(
                "cpu", init_scale=8.0, growth_interval=2, enabled=program.has_scaler
            )
            self.critic = nn.Linear(NUM_CLASSES, 1)
            self.second = SGD(self.critic.parameters(), momentum=0.5)
            self.average: nn.Module = copy.deepcopy(self.model).requires_grad_(False)
            if program.average == "averaged model":
                self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.8))

    def _groups(self) -> Any:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if not self._program.has_groups or self._program.optimizer == "Adam with a tensor":
            return trained
        flat = {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02}
        return [{"params": [p for p in trained if p.dim() > 1]}, flat]

    def train(self) -> dict[str, Tensor]:
        """Returns everything that a program can see at the end."""
        seen: list[float] = []
        for number, batch in enumerate(self._batches()):
            if self._program.freezing == "between epochs" and number == NUM_BATCHES:
                self.model.words.weight.requires_grad_(False)
                self.model.words.weight.grad = None
            seen += map(float, self._run(batch, number))
            if self._program.updates_outside and self._is_update(number):
                self._update()
        return dict(self._found(), seen=torch.tensor(seen))

    def _batches(self) -> Iterator[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(self._program.seed)
        size = NUM_BATCHES * BATCH_SIZE
        data = (
            torch.randint(NUM_WORDS, (size, 4), generator=generator),
            torch.randn(size, WIDTH, generator=generator),
            torch.randint(NUM_CLASSES, (size,), generator=generator),
        )
        for _ in range(self.num_epochs):
            yield from zip(*(one.split(BATCH_SIZE) for one in data), strict=True)

    def _run(self, batch: tuple[Tensor, ...], number: int) -> list[Tensor]:
        if self._strategy is None:
            return self._step(number, *batch)
        (given,) = self._strategy.experimental_distribute_dataset([batch])
        found = self._strategy.run(self._step, args=(number, *given))
        return [self._strategy.reduce("MEAN", one) for one in found]

    def _autocast(self) -> AbstractContextManager[Any]:
        is_cached = self._program.autocast != "without a cache"
        is_on = self._program.autocast != "none"
        return torch.autocast("cpu", torch.bfloat16, enabled=is_on, cache_enabled=is_cached)

    def _is_update(self, number: int) -> bool:
        return (number + 1) % self._program.num_accumulated == 0

    def _clear(self) -> None:
        if self._program.clearing == "by the model":
            self.model.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=self._program.clearing != "to zero")

    def _step(self, number: int, words: Tensor, numbers: Tensor, labels: Tensor) -> list[Tensor]:
        program, is_update = self._program, self._is_update(number)
        if number % program.num_accumulated == 0 and program.clearing != "after the update":
            self._clear()
        is_alone = program.has_no_sync and not is_update and self._strategy is not None
        with self._strategy.no_sync() if is_alone and self._strategy else nullcontext():
            with self._autocast():
                scores = self.model(words, numbers)
                if program.autocast == "weights used twice":
                    scores = scores + 0.1 * self.model(words, -numbers)
                scores = scores.float()
                with torch.autocast("cpu", enabled=program.autocast == "with the loss"):
                    loss = nn.functional.cross_entropy(scores, labels)
            if program.passes == "penalty":
                (inner,) = torch.autograd.grad(
                    scores.square().mean(), self.model.out.bias, create_graph=True
                )
                loss = loss + 0.1 * inner.sum()
            self.scaler.scale(loss).backward(retain_graph=program.passes == "two losses")
            if program.passes == "two losses":
                self.scaler.scale(0.3 * scores.square().mean()).backward()
        if program.passes == "second model at once":
            self._judge(scores.detach())
        logged: list[Tensor] = []
        if is_update and not program.updates_outside:
            logged = self._update()
        if program.passes.startswith("second"):
            if program.passes == "second optimizer":
                self._judge(self.model(words, numbers).detach())
            self.second.step()
        return [loss.detach(), *logged]

    def _judge(self, scores: Tensor) -> None:
        self.second.zero_grad()
        self.critic(scores).square().mean().backward()

    def _update(self) -> list[Tensor]:
        program = self._program
        self.scaler.unscale_(self.optimizer)
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        logged = [torch.stack([grad.norm() for grad in grads]).sum()] if program.has_logs else []
        self._clip(grads)
        if self._change_rates is not None:
            self._change_rates()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if program.clearing == "after the update":
            self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        if program.average == "by hand":
            uo.once(self._follow)
        elif isinstance(self.average, AveragedModel):
            self.average.update_parameters(self.model)
        return logged

    def _lower_rates(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * 0.9

    def _clip(self, grads: list[Tensor]) -> None:
        clip: dict[str, Callable[[], object]] = {
            "norm": lambda: clip_grad_norm_(self.model.parameters(), 0.3),
            "largest": lambda: clip_grad_norm_(self.model.parameters(), 0.05, float("inf")),
            "value": lambda: clip_grad_value_(self.model.parameters(), 0.02),
            "by hand": lambda: [grad.clamp_(-0.02, 0.02) for grad in grads],
            "none": lambda: None,
        }
        clip[self._program.clipping]()

    @torch.no_grad()
    def _follow(self) -> None:
        for own, other in zip(self.average.parameters(), self.model.parameters(), strict=True):
            own.lerp_(other, 0.3)

    def _found(self) -> Iterator[tuple[str, Tensor]]:
        for name, module in (("model", self.model), ("average", self.average)):
            for key, value in module.state_dict().items():
                yield f"{name} {key}", value.detach().clone()
        yield "critic", self.critic.weight.detach().clone()
        yield "scale", torch.tensor(self.scaler.get_scale())


def replicas_agree(model: nn.Module, strategy: uo.Strategy) -> bool:
    """Whether all replicas see the same weights."""

    def weights() -> Tensor:
        return torch.cat(
            [torch.view_as_real(p.detach() + 0j).flatten() for p in model.parameters()]
        )

    first, *others = strategy.experimental_local_results(strategy.run(weights))
    return all(torch.equal(first, one) for one in others)
