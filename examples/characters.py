"""Learns to write like Python's own documentation, letter by letter.

    python examples/characters.py
    python examples/characters.py --replicas 4 --epochs 2

The text is `pydoc_data.topics`, which comes with Python. The model is a Transformer with one layer.
The step is plain torch: dropout, gradient clipping and a learning rate with warmup. The model ends
below 3 bits per letter; guessing by the frequency of letters needs 4.7. Two runs print the same
text, because each replica has its own stream of random numbers.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import unisono as uo

LENGTH = 64
WIDTH = 96
NUM_LETTERS = 150_000
BATCH_SIZE = 16


class Writer(nn.Module):
    """A causal Transformer over letters."""

    def __init__(self, num_symbols: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(num_symbols, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.05, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.scores = nn.Linear(WIDTH, num_symbols)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        hidden = self.symbols(text) + self.places.weight[:length]
        mask = self.get_buffer("mask")[:length, :length]
        scores: Tensor = self.scores(self.layers(hidden, mask=mask, is_causal=True))
        return scores

    @torch.no_grad()
    def write(self, text: Tensor, length: int) -> Tensor:
        """Continues `text`, one letter at a time."""
        for _ in range(length):
            scores = self(text[:, -LENGTH:])[:, -1]
            letter = torch.multinomial(torch.softmax(scores / 0.7, dim=1), 1)
            text = torch.cat([text, letter], dim=1)
        return text


def load() -> tuple[Tensor, str]:
    """Returns the text as numbers, and the letter of each number."""
    text = "\n".join(topics[name] for name in sorted(topics))[:NUM_LETTERS]
    symbols = "".join(sorted(set(text)))
    return torch.tensor([symbols.index(letter) for letter in text]), symbols


def train(strategy: uo.Strategy, num_epochs: int) -> float:
    """Trains, prints a sample, and returns the bits per letter of the last epoch."""
    torch.manual_seed(1)
    text, symbols = load()
    # Windows of the text. They overlap by one letter: the last one of a window is only a target.
    windows = text.unfold(0, LENGTH + 1, LENGTH)
    loader: DataLoader[Tensor] = DataLoader(windows, batch_size=BATCH_SIZE, shuffle=True)  # type: ignore[arg-type]
    batches = strategy.experimental_distribute_dataset(loader)
    with strategy.scope():
        model = Writer(len(symbols))
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        num_steps = num_epochs * len(loader)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=num_steps)

    def step(window: Tensor) -> Tensor:
        optimizer.zero_grad()
        scores = model(window[:, :-1])
        losses = nn.functional.cross_entropy(scores.mT, window[:, 1:], reduction="none")
        losses.mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        return losses.detach()

    for epoch in range(num_epochs):
        total = 0.0
        for window in batches:
            losses = strategy.run(step, args=(window,))
            total += float(strategy.reduce(uo.ReduceOp.SUM, losses, axis=(0, 1)))
        bits = total / windows[:, 1:].numel() / math.log(2)
        print(f"epoch {epoch + 1}: {bits:.3f} bits per letter")
    model.eval()
    start = torch.tensor([[symbols.index(letter) for letter in "The "]])
    print("".join(symbols[number] for number in model.write(start, 200)[0]))
    return bits


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--replicas", type=int, default=2, help="number of replicas (default: 2)")
    parser.add_argument("--epochs", type=int, default=4, help="number of epochs (default: 4)")
    options = parser.parse_args(arguments)
    strategy = uo.MirroredStrategy([f"cpu:{i}" for i in range(options.replicas)])
    bits = train(strategy, options.epochs)
    strategy.close()
    return bits


if __name__ == "__main__":
    main()
