"""Language models, and parts of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import unisono as uo
from programs.generative import numbers
from programs.running import Learned, program, refused

VOCABULARY = 11
Hidden = tuple[Tensor, Tensor]


def words(*shape: int, seed: int = 3, high: int = VOCABULARY) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


class RNNModel(nn.Module):
    """After pytorch/examples/word_language_model: encoder and decoder have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCABULARY, 6)
        self.rnn = nn.LSTM(6, 6, 2)
        self.decoder = nn.Linear(6, VOCABULARY)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, input: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
        output, hidden = self.rnn(self.encoder(input), hidden)
        decoded = self.decoder(output).view(-1, VOCABULARY)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz: int) -> Hidden:
        weight = next(self.parameters())
        return weight.new_zeros(2, bsz, 6), weight.new_zeros(2, bsz, 6)


def repackage_hidden(hidden: Hidden) -> Hidden:
    """Wraps hidden states in new Tensors, to detach them from their history."""
    return hidden[0].detach(), hidden[1].detach()


def time_major_batches(num_columns: int) -> list[tuple[Tensor, Tensor]]:
    """Pieces of `num_columns` texts; time is the first dimension."""
    source = words(13, num_columns)
    return [(source[i : i + 4], source[i + 1 : i + 5]) for i in range(0, 12, 4)]


def train_word_language_model(strategy: Any, update: Any) -> Learned:
    with strategy.scope():
        model = RNNModel()
    criterion = nn.NLLLoss()

    def step(data: Tensor, targets: Tensor, hidden: Hidden | None) -> Hidden:
        if hidden is None:
            hidden = model.init_hidden(data.size(1))
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets.reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        update(model)
        return repackage_hidden(hidden)

    options = uo.InputOptions(batch_dim=1)
    hidden = None
    for data, targets in strategy.experimental_distribute_dataset(time_major_batches(5), options):
        hidden = strategy.run(step, args=(data, targets, hidden))
    return model.state_dict()


@program()
def word_language_model(strategy: Any) -> Learned:
    """The update by hand of the original is made once for all replicas."""

    def update(model: nn.Module) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.data.add_(p.grad, alpha=-20.0)

    return train_word_language_model(strategy, lambda model: uo.once(update, model))


@refused(uo.errors.ContextError, "encoder.weight", "unisono.once")
def word_language_model_by_hand(strategy: Any) -> Learned:
    """Every replica would write the weights, which they share."""

    def update(model: nn.Module) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.data.add_(p.grad, alpha=-20.0)

    return train_word_language_model(strategy, update)


def train_classes(strategy: Any, model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    for batch in strategy.experimental_distribute_dataset(loader):
        strategy.run(step, args=batch)


class LoRALinear(nn.Module):
    """A frozen layer and a low-rank change of it, after microsoft/LoRA."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(numbers(rank, base.in_features) * 0.1)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + x @ self.lora_a.T @ self.lora_b.T * 4.0
        return out


@program()
def lora(strategy: Any) -> Learned:
    """A model that was trained elsewhere gets adapters, of which only these are trained."""
    model = nn.Sequential(nn.Embedding(VOCABULARY, 6), nn.Flatten(), nn.Linear(18, 8), nn.GELU())
    model.append(nn.Linear(8, VOCABULARY)).requires_grad_(False)
    for name, module in list(model.named_children()):
        if isinstance(module, nn.Linear):
            setattr(model, name, LoRALinear(module))
    strategy.mirror(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = strategy.mirror(torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1))

    train_classes(strategy, model, optimizer, words(10, 3), words(10, seed=4))
    merged = {
        f"{name}.merged": module.base.weight + module.lora_b @ module.lora_a * 4.0
        for name, module in model.named_modules()
        if isinstance(module, LoRALinear)
    }
    return {**model.state_dict(), **merged}


class MixtureOfExperts(nn.Module):
    """Each token goes to one expert. Most experts see no token of a replica, one never sees any."""

    def __init__(self, num_experts: int = 5) -> None:
        super().__init__()
        self.gate = nn.Linear(6, num_experts)
        self.gate.bias.data[-1] = -100.0
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(num_experts))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, weights[rows, None] * expert(x[rows]))
        scores: Tensor = self.head(out)
        return scores


@program()
def mixture_of_experts(strategy: Any) -> Learned:
    with strategy.scope():
        model = MixtureOfExperts()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)

    train_classes(strategy, model, optimizer, numbers(10, 6), words(10, high=2))
    return model.state_dict()
