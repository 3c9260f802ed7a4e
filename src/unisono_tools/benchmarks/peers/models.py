"""The models of the training benchmark, each with one replica's batch and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

NUM_CLASSES = 10
NUM_WORDS, WORD_WIDTH, WORDS_PER_TEXT = 100_000, 64, 16
NUM_TOKENS, LENGTH, WIDTH = 1_000, 32, 128

Batch: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        make_model: Builds the model; the caller sets the seed.
        batch_size: The samples of one replica.
        make_input: Draws one replica's input.
        momentum: That of SGD; sparse gradients have none.
    """

    make_model: Callable[[], nn.Module]
    batch_size: int
    make_input: Callable[[int], Tensor]
    momentum: float = 0.9

    def batch(self, replica_id: int) -> Batch:
        """Returns a replica's batch, the same in every process."""
        torch.manual_seed(1000 + replica_id)
        inputs = self.make_input(self.batch_size)
        return inputs, torch.randint(NUM_CLASSES, (self.batch_size,))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=self.momentum)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
    """One step of plain torch, which all torch competitors run as it is."""
    inputs, labels = batch
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, NUM_CLASSES),
    )


def convnet() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 5 * 5, 64),
        nn.ReLU(),
        nn.Linear(64, NUM_CLASSES),
    )
    # The layout that TensorFlow has, and in which torch's pooling is vectorized on a CPU.
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


class BagOfWords(nn.Module):
    """The mean of word vectors, and two layers; only the rows of a batch have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, WORD_WIDTH, sparse=True)
        self.head = nn.Sequential(
            nn.Linear(WORD_WIDTH, WORD_WIDTH), nn.ReLU(), nn.Linear(WORD_WIDTH, NUM_CLASSES)
        )

    def forward(self, texts: Tensor) -> Tensor:
        scores: Tensor = self.head(self.words(texts).mean(dim=1))
        return scores


class Transformer(nn.Module):
    """Two layers of width 128 over 32 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, texts: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(self.tokens(texts)).mean(dim=1))
        return scores


def _pixels(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch_size: torch.randn(batch_size, *shape)


def _images(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch_size: torch.randn(batch_size, *shape).to(memory_format=torch.channels_last)


def _texts(num_words: int, length: int) -> Callable[[int], Tensor]:
    return lambda batch_size: torch.randint(num_words, (batch_size, length))


CASES = {
    "MLP 256": Case(lambda: mlp(256), 32, _pixels(784)),
    "MLP 1024": Case(lambda: mlp(1024), 64, _pixels(784)),
    "MLP 2048": Case(lambda: mlp(2048), 64, _pixels(784)),
    "ConvNet": Case(convnet, 32, _images(1, 28, 28)),
    "Embedding": Case(BagOfWords, 64, _texts(NUM_WORDS, WORDS_PER_TEXT), momentum=0.0),
    "Transformer": Case(Transformer, 16, _texts(NUM_TOKENS, LENGTH)),
}
