"""Training programs in float64 whose steps use features of torch that are drawn at random."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from failing import Failing
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.hooks import RemovableHandle

import unisono as uo
from programs.random_blocks import BLOCKS, NORMS, ONCE_DIFFERENTIABLE, WIDTH, WITH_SPARSE

NUM_CLASSES, NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 3, 18, 5, 2
HOOKS = ("none", "none", "features", "outside", "stay", "once only", "backward", "accumulated")
PASSES = ("one", "one", "two", "penalty", "assigned", "failed", "closure", "of inputs")
FREEZING = ("none", "none", "in turns", "in turns from the start", "gradually", "between epochs")
UPDATES = ("none", "none", "clamped", "average", "target", "restored")
SCHEDULES = ("none", "in turn", "chained", "plateau", "average")
BETWEEN = ("none", "evaluation", "loaded", "error", "new group", "other optimizer")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": functools.partial(torch.optim.Adam, lr=0.02),
    "AMSGrad": functools.partial(torch.optim.AdamW, lr=0.02, amsgrad=True, foreach=True),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.05),
    "Adadelta": functools.partial(torch.optim.Adadelta, lr=0.5),
    "Adamax": functools.partial(torch.optim.Adamax, lr=0.02),
    "ASGD": functools.partial(torch.optim.ASGD, lr=0.1, t0=3),
    "NAdam": functools.partial(torch.optim.NAdam, lr=0.02),
    "RAdam": functools.partial(torch.optim.RAdam, lr=0.02),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.01, centered=True),
}


@dataclass(frozen=True)
class FeatureProgram:
    """What is trained, and how."""

    seed: int
    num_replicas: int
    has_memories: bool
    is_captured: bool
    blocks: tuple[str, ...]
    optimizer: str
    hooks: str
    passes: str
    freezing: str
    update: str
    schedule: str
    between: str
    clips: bool

    @staticmethod
    def drawn(seed: int) -> FeatureProgram:
        """Draws one."""
        rng = random.Random(seed)
        blocks = tuple(rng.choice(list(BLOCKS)) for _ in range(rng.choice((1, 2, 3))))
        passes = rng.choice(PASSES)
        is_sparse, is_normed = (not own.isdisjoint(blocks) for own in (WITH_SPARSE, NORMS.keys()))
        # Samples that are normalized together depend on each other, and so do their gradients.
        if passes == "penalty" and (is_normed or not ONCE_DIFFERENTIABLE.isdisjoint(blocks)):
            passes = "one"
        # It asks for gradients of a part of the graph, which a reentrant checkpoint cannot give.
        if passes in ("assigned", "of inputs") and "reentrant checkpoint" in blocks:
            passes = "one"
        # Where a normalization follows, the gradient of a bias is zero but for rounding, which
        # others make large.
        optimizers = ("SGD", "momentum", *(() if is_normed else sorted(OPTIMIZERS)))
        return FeatureProgram(
            seed=seed,
            num_replicas=rng.choice((2, 3)),
            has_memories=rng.random() < 0.5,
            is_captured=rng.random() < 0.15,
            blocks=blocks,
            optimizer="SGD" if is_sparse else rng.choice(optimizers),
            hooks=rng.choice(HOOKS),
            passes=passes,
            freezing=rng.choice(FREEZING),
            update=rng.choice(UPDATES),
            schedule=rng.choice(SCHEDULES),
            between=rng.choice(BETWEEN),
            # torch cannot clip sparse gradients.
            clips=not is_sparse and rng.random() < 0.5,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What the strategy is made with."""
        return {"synchronize_batch_norm": not NORMS.keys().isdisjoint(self.blocks)}


def optimizer_for(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name in OPTIMIZERS:
        made: torch.optim.Optimizer = OPTIMIZERS[name](parameters)
        return made
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if name == "momentum" else 0.0)


def clamp(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.1, 0.1)


def mean_of_all(value: Tensor) -> Tensor:
    """Returns the mean over the whole batch."""
    context = uo.get_replica_context()
    if context is None:
        return value
    mean: Tensor = context.all_reduce("MEAN", value * context.weight)
    return mean


class FeatureTraining:
    """A program under way: without a strategy, as torch runs it."""

    num_epochs = NUM_EPOCHS

    def __init__(self, program: FeatureProgram, strategy: uo.Strategy | None) -> None:
        self._program, self._strategy = program, strategy
        torch.manual_seed(program.seed)
        self._scope: Callable[[], AbstractContextManager[Any]] = (
            nullcontext if strategy is None else strategy.scope
        )
        with self._scope():
            self.body = nn.Sequential(
                nn.Linear(WIDTH, WIDTH), *(BLOCKS[b]() for b in program.blocks)
            )
            self.head = nn.Linear(WIDTH, NUM_CLASSES)
            self.model = nn.Sequential(self.body, nn.Tanh(), self.head)
            self.target = copy.deepcopy(self.head).requires_grad_(False)
            self.average = AveragedModel(self.head)
            self._make_optimizers()
        if program.freezing in ("in turns from the start", "gradually"):
            self.head.requires_grad_(False)
        self._step_of_run = self._step
        if program.is_captured and strategy is not None:
            self._step_of_run = uo.function(self._step)
        self._handle: RemovableHandle | None = None
        self._add_hooks()

    def _make_optimizers(self) -> None:
        program = self._program
        self.first = optimizer_for(program.optimizer, self.body.parameters())
        self.second = optimizer_for(program.optimizer, self.head.parameters())
        self.optimizers = (self.first, self.second)
        of_first: dict[str, Callable[[], Any]] = {
            "none": lambda: None,
            "in turn": lambda: lr_scheduler.SequentialLR(
                self.first,
                [lr_scheduler.ConstantLR(self.first), lr_scheduler.ExponentialLR(self.first, 0.9)],
                [2],
            ),
            "chained": lambda: lr_scheduler.ChainedScheduler(
                [lr_scheduler.ConstantLR(self.first), lr_scheduler.ExponentialLR(self.first, 0.9)]
            ),
            "plateau": lambda: lr_scheduler.ReduceLROnPlateau(self.first, patience=0),
            "average": lambda: SWALR(self.first, swa_lr=0.05, anneal_epochs=3),
        }
        self.scheduler = of_first[program.schedule]()

    def _add_hooks(self) -> None:
        first: Any = self.body[0]
        if self._program.hooks == "outside":
            first.register_forward_hook(lambda _, args, out: out * 1.1)
            first.weight.register_hook(lambda grad: grad * 1.2)
        elif self._program.hooks == "once only":
            self._handle = first.register_forward_hook(self._only_once)
        elif self._program.hooks == "backward":
            head: Any = self.head
            head.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 1.5,))
        elif self._program.hooks == "accumulated":
            first.weight.register_post_accumulate_grad_hook(clamp)

    def _only_once(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        assert self._handle is not None
        self._handle.remove()
        return out * 2

    def train(self) -> dict[str, Tensor]:
        """Returns everything that a program can see at the end."""
        seen: list[float] = []
        for epoch in range(self.num_epochs):
            if epoch > 0:
                seen += self._between()
            for number, batch in enumerate(self._batches()):
                seen += self._run(self._step_of_run, number + 10 * epoch, *batch)
        return dict(self._found(), seen=torch.tensor(seen))

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self._program.seed)
        x = torch.randn(NUM_SAMPLES, WIDTH, generator=generator)
        y = torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=generator)
        return zip(x.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True)

    def _run(self, step: Callable[..., Tensor], number: int, x: Tensor, y: Tensor) -> list[float]:
        if self._strategy is None:
            return [float(step(number, x, y))]
        (parts,) = self._strategy.experimental_distribute_dataset([(x, y)])
        found = self._strategy.run(step, args=(number, *parts))
        return [float(self._strategy.reduce("MEAN", found))]

    def _between(self) -> list[float]:
        what, batch = self._program.between, next(self._batches())
        if what == "evaluation":
            self.model.eval()
            found = self._run(self._evaluate, 0, *batch)
            self.model.train()
            return found
        if what == "loaded":
            state = copy.deepcopy((self.model.state_dict(), self.first.state_dict()))
            self._run(self._step_of_run, 8, *batch)
            self.model.load_state_dict(state[0])
            self.first.load_state_dict(state[1])
        elif what == "error":
            try:
                self._run(self._stop, 0, *batch)
            except ValueError:
                self.model.zero_grad()
        elif what == "new group":
            torch.manual_seed(self._program.seed + 1)
            with self._scope():
                self.more = nn.Linear(WIDTH, NUM_CLASSES)
            self.second.add_param_group({"params": list(self.more.parameters())})
        elif what == "other optimizer":
            self.scheduler = None
            self.first = torch.optim.Adamax(self.body[0].parameters(), lr=0.01)
            self.optimizers = (self.first, self.second)
        if self._program.freezing == "between epochs":
            self.head.requires_grad_(False)
        return []

    def _evaluate(self, number: int, x: Tensor, y: Tensor) -> Tensor:
        with torch.inference_mode():
            return cross_entropy(self.model(x), y)

    def _stop(self, number: int, x: Tensor, y: Tensor) -> Tensor:
        # A run that fails changes no buffer, and unfreezes nothing.
        cross_entropy(self.head(x.clone().requires_grad_()), y).backward()
        raise ValueError("not this time")

    def _scores(self, x: Tensor) -> Tensor:
        first: Any = self.body[0]
        extra = self.more(x) if hasattr(self, "more") else 0.0
        scores: Tensor
        if self._program.hooks != "features":
            scores = self.model(x) + extra
            return scores
        seen: list[Tensor] = []
        with first.register_forward_hook(lambda _, args, out: seen.append(out)):
            scores = self.model(x) + extra
        (features,) = seen
        return scores + 0.1 * features[:, :NUM_CLASSES]

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self._scores(x), y)

    def _step(self, number: int, x: Tensor, y: Tensor) -> Tensor:
        program = self._program
        if program.hooks == "stay" and number == 1:
            first: Any = self.body[0]
            first.register_forward_hook(lambda _, args, out: out * 1.1)
            first.weight.register_hook(lambda grad: grad * 1.1)
        if program.freezing == "gradually" and number >= 2:
            self.head.requires_grad_(True)
        loss: Tensor
        if program.passes == "closure":
            optimizer: Any = self.first
            loss = optimizer.step(lambda: self._backward(x, y))
        elif program.freezing.startswith("in turns"):
            self.head.requires_grad_(True)
            self.body.requires_grad_(False)
            loss = self._backward(x, y)
            self.second.step()
            self.body.requires_grad_(True)
            self.head.requires_grad_(False)
            loss = loss + self._backward(x, y)
            self.first.step()
        else:
            loss = self._backward(x, y)
            for optimizer in self.optimizers:
                optimizer.step()
        self._after_update(loss.detach())
        return loss.detach()

    def _backward(self, x: Tensor, y: Tensor) -> Tensor:
        program = self._program
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if program.passes == "failed":
            try:
                Failing.apply(self._loss(x, y)).backward()  # type: ignore[no-untyped-call]
            except ValueError:
                self.model.zero_grad()
        if program.passes == "penalty":
            x = x.clone().requires_grad_()
            scores = self._scores(x)
            (grad,) = torch.autograd.grad(scores.square().sum(), x, create_graph=True)
            loss = cross_entropy(scores, y) + 0.1 * grad.square().sum(1).mean()
        else:
            loss = self._loss(x, y)
        if program.passes == "assigned":
            grads = torch.autograd.grad(loss, trained, allow_unused=True)
            for p, own in zip(trained, grads, strict=True):
                p.grad = own
        elif program.passes == "of inputs":
            loss.backward(inputs=trained)
        else:
            loss.backward()
        if program.passes == "two":
            self._scores(2 * x).square().mean().backward()
        # An assigned gradient is that of this replica until the update.
        if program.clips and program.passes != "assigned":
            clip_grad_norm_(self.model.parameters(), 0.2)
        return loss

    def _after_update(self, loss: Tensor) -> None:
        update = self._program.update
        if self._program.schedule == "plateau" and self.scheduler is not None:
            self.scheduler.step(mean_of_all(loss))
        elif self.scheduler is not None:
            self.scheduler.step()
        if update == "clamped":
            uo.once(lambda: self.head.weight.data.clamp_(-0.3, 0.3))
        elif update == "average":
            self.average.update_parameters(self.head)
        elif update == "target":
            uo.once(self._follow)
        elif update == "restored":
            before = uo.once(lambda: copy.deepcopy(self.target.state_dict()))
            uo.once(lambda: self.target.load_state_dict({k: v + 1 for k, v in before.items()}))

    @torch.no_grad()
    def _follow(self) -> None:
        for own, other in zip(self.target.parameters(), self.head.parameters(), strict=True):
            own.lerp_(other, 0.3)

    def _found(self) -> Iterator[tuple[str, Tensor]]:
        modules = {"model": self.model, "average": self.average, "target": self.target}
        for name, module in modules.items():
            for key, value in module.state_dict().items():
                yield f"{name} {key}", value.detach().clone()
        for number, optimizer in enumerate(self.optimizers):
            yield f"rate {number}", torch.tensor(float(optimizer.param_groups[0]["lr"]))
