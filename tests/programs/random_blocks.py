"""Parts of models for random programs, each of which uses torch in another way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call, jacrev, jvp, vmap
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

WIDTH = 6


class Scale(torch.autograd.Function):
    """A product, whose gradient can be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class ScaleOnce(Scale):
    """A product, whose gradient cannot be differentiated."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class DoubleInPlace(torch.autograd.Function):
    """Writes to its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad


class ScaleEach(Scale):
    """The same for functions of `torch.func`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return x * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight, grad * x


class OwnPass(torch.autograd.Function):
    """Makes a backward pass inside a backward pass, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        with torch.enable_grad():
            ctx.given = x.detach().requires_grad_()
            ctx.out = layer(ctx.given)
        out: Tensor = ctx.out.detach()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.out.backward(grad)
        return ctx.given.grad, None


class Block(nn.Module):
    """A layer, a vector, and what is done with them."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.use = use
        self.num_calls, self.seen = 0, list[int]()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def reused(block: Any, x: Tensor) -> Tensor:
    out: Tensor = block.layer(torch.tanh(block.layer(x))) * block.scale
    return out


def scaled_weights(block: Any, x: Tensor) -> Tensor:
    weights = {name: p * 0.5 for name, p in block.layer.named_parameters()}
    out: Tensor = functional_call(block.layer, weights, (x,)) * block.scale
    return out


def moving_mean(block: Any, x: Tensor) -> Tensor:
    if block.training:
        block.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        block.is_set.fill_(True)
    out: Tensor = block.layer(x) * (2 if block.is_set else 1)
    return out


def assigned_mean(block: Any, x: Tensor) -> Tensor:
    if block.training:
        block.mean.data = block.mean * 0.9 + x.detach().mean(0) * 0.1
        block.is_set.data = torch.tensor(True)
    out: Tensor = block.layer(x) * (2 if block.is_set else 1)
    return out


def each_sample(block: Any, x: Tensor) -> Tensor:
    scale: Any = ScaleEach.apply
    out: Tensor = vmap(lambda one: scale(block.layer(one), block.scale))(x)
    return out


def jacobian(block: Any, x: Tensor) -> Tensor:
    out: Tensor = block.layer(x) + vmap(jacrev(lambda one: torch.tanh(block.layer(one))))(x).sum(1)
    return out


def rounded(block: Any, x: Tensor) -> Tensor:
    out = block.layer(x) * block.scale
    result: Tensor = out + (out.sign() - out).detach()
    return result


def on_host(block: Any, x: Tensor) -> Tensor:
    with save_on_cpu():
        out: Tensor = torch.sin(block.layer(x)) * block.scale
    return out


def counter(block: Any, x: Tensor) -> Tensor:
    block.num_calls += 1
    block.seen.append(block.num_calls)
    out: Tensor = block.layer(x) / block.num_calls * len(block.seen)
    return out


def own_noise(block: Any, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    out: Tensor = block.layer(x + torch.randn(WIDTH, generator=generator))
    return out


def seeded_noise(block: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        noise = torch.rand(WIDTH)
    out: Tensor = block.layer(x + noise)
    return out


def some_samples(block: Any, x: Tensor) -> Tensor:
    rows = (x[:, 0] > 0.6).nonzero().flatten()
    return x.index_add(0, rows, block.layer(x[rows])) if len(rows) else x


def derivative(block: Any, x: Tensor) -> Tensor:
    found = jvp(lambda given: torch.tanh(block.layer(given)), (x,), (torch.ones_like(x),))
    total: Tensor = found[0] + found[1]
    return total


def on_saved_copies(block: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        out: Tensor = block.layer(x) * block.scale
    return out


def checked(block: Any, x: Tensor, *, is_reentrant: bool) -> Tensor:
    layers = (block.layer, torch.tanh, lambda hidden: hidden * block.scale)
    x = checkpoint(block.layer, x, use_reentrant=is_reentrant)
    out: Tensor = checkpoint_sequential(layers, 2, x, use_reentrant=is_reentrant)
    return out


class Wrapped(nn.Module):
    """Gives a layer of torch what it takes, and makes a matrix of what it returns."""

    def __init__(self, layer: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.shape = layer, shape

    def forward(self, x: Tensor) -> Tensor:
        given = x.reshape(len(x), *self.shape)
        out = self.layer(*[given] * 3) if hasattr(self.layer, "num_heads") else self.layer(given)
        out = out[0] if isinstance(out, tuple) else out
        result: Tensor = x + out.reshape(len(x), -1)[:, :WIDTH]
        return result


class Words(nn.Module):
    """Looks up rows of a table."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        found = self.table((x.detach().abs() * 3).long().clamp(max=9))
        result: Tensor = x + (found.mean(1) if found.dim() == 3 else found)
        return result


class Weights(nn.Module):
    """Parameters in containers of torch, one of them complex."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([torch.randn(WIDTH, WIDTH) * 0.3 for _ in range(2)])
        self.named = nn.ParameterDict({"phase": torch.randn(WIDTH, dtype=torch.complex128)})
        # Not contiguous.
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH).T)

    def forward(self, x: Tensor) -> Tensor:
        for weight in (*self.several, self.turned):
            x = torch.tanh(x @ weight)
        result: Tensor = (x * self.named["phase"]).abs()
        return result


class FrozenNorm(nn.BatchNorm1d):
    """Uses its statistics also where the model is trained."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.eval()

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode=False)
        return self


def convolution() -> nn.Module:
    layer = nn.Conv2d(2, 2, (1, 3), padding=(0, 1))
    return Wrapped(layer.to(memory_format=torch.channels_last), (2, 1, 3))  # type: ignore[call-overload]


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def apply(function: Any) -> Callable[[Any, Tensor], Tensor]:
    return lambda block, x: function.apply(block.layer(x), block.scale)


USES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "reused": reused,
    "scaled weights": scaled_weights,
    "moving mean": moving_mean,
    "counter": counter,
    "own noise": own_noise,
    "seeded noise": seeded_noise,
    "some samples": some_samples,
    "derivative": derivative,
    "assigned mean": assigned_mean,
    "each sample": each_sample,
    "jacobian": jacobian,
    "rounded": rounded,
    "on host": on_host,
    "on saved copies": on_saved_copies,
    "checkpoint": functools.partial(checked, is_reentrant=False),
    "reentrant checkpoint": functools.partial(checked, is_reentrant=True),
    "vmap": lambda block, x: vmap(block.layer)(x) * block.scale,
    "function": apply(Scale),
    "function that is differentiable once": apply(ScaleOnce),
    "function in place": lambda block, x: DoubleInPlace.apply(block.layer(x) * block.scale),  # type: ignore[no-untyped-call]
    "own pass": lambda block, x: OwnPass.apply(x, block.layer),  # type: ignore[no-untyped-call]
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "weight norm": lambda: parametrizations.weight_norm(linear()),
    "spectral norm": lambda: parametrizations.spectral_norm(linear()),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "lstm": lambda: Wrapped(nn.LSTM(2, 2, 2, batch_first=True, bidirectional=True), (3, 2)),
    "gru": lambda: Wrapped(nn.GRU(2, 3, batch_first=True), (3, 2)),
    "attention": lambda: Wrapped(nn.MultiheadAttention(2, 2, batch_first=True), (3, 2)),
    "transformer": lambda: Wrapped(
        nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True), (3, 2)
    ),
    "words": lambda: Words(nn.Embedding(10, WIDTH)),
    "short words": lambda: Words(nn.Embedding(10, WIDTH, max_norm=0.5)),
    "short bag": lambda: Words(nn.EmbeddingBag(10, WIDTH, max_norm=0.5)),
    "pruned": lambda: prune.l1_unstructured(linear(), "weight", 0.3),
    "sparse words": lambda: Words(nn.Embedding(10, WIDTH, sparse=True)),
    "sparse bag": lambda: Words(nn.EmbeddingBag(10, WIDTH, sparse=True)),
    "group norm": lambda: nn.Sequential(linear(), nn.GroupNorm(2, WIDTH)),
    "instance norm": lambda: Wrapped(nn.InstanceNorm1d(2, track_running_stats=True), (2, 3)),
    "frozen batch norm": FrozenNorm,
    "weights": Weights,
    "convolution": convolution,
}
# Only where it is synchronized, these do as on one device.
NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "mean of batches": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
}
BLOCKS: dict[str, Callable[[], nn.Module]] = {
    **{name: functools.partial(Block, use) for name, use in USES.items()},
    **LAYERS,
    **NORMS,
}
# Optimizers but SGD take no sparse gradients. Others take no complex parameters.
WITH_SPARSE = frozenset({"sparse words", "sparse bag"})
ONCE_DIFFERENTIABLE = frozenset(
    {
        *("function that is differentiable once", "own pass", "reentrant checkpoint"),
        *("attention", "transformer"),
    }
)
